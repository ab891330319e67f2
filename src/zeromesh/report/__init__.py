"""Plans and simulations for people: tables in the terminal, one self-contained HTML page."""
