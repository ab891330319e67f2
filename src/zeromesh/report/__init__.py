"""Plans and simulations for people: tables in the terminal, one self-contained HTML page."""

from zeromesh.report.build import choice_lines, plan_page, simulation_page, what_if_lines
from zeromesh.report.text import print_plan, print_simulation

__all__ = ["choice_lines", "plan_page", "print_plan", "print_simulation", "simulation_page", "what_if_lines"]
