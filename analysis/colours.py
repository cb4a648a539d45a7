"""Okabe and Ito's colours: told apart with any colour vision; line styles and markers differ besides."""

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
