def is_rest_kept(found):
    return found.get("shape") == {"colour": "kept"}
