"""Colours of all drawings, distinct for colour-blind readers (Okabe and Ito, "Color Universal Design", 2008)."""

BLACK, GREY, ORANGE, SKY, GREEN = "#000000", "#999999", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
SHARES = {"compute": GREEN, "data": ORANGE, "communication": BLUE}
"""Colours of the shares of a rank's time."""
