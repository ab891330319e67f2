def print_header(*a, **k):
    pass


def print_summary(*a, **k):
    pass
