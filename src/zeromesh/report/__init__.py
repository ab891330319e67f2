"""Shows plans and simulations to people: tables in the terminal, or one self-contained HTML page."""
