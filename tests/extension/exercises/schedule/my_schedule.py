def zigzag(step, *, low=0.01, high=0.1):
    """high in even steps, low in odd ones"""
    return low if step % 2 else high
