def soft_clipped(ratio, advantages, *, sharpness=1.0):
    """The ratio, pressed together by tanh around 1. Loss per token [B, T]"""
    pressed = 1 + (sharpness * (ratio - 1)).tanh() / sharpness
    return -pressed * advantages, {"off_policy": (ratio - 1).abs()}
