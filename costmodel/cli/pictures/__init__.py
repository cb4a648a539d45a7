"""Pictures of dsq-cost. Colours are Okabe and Ito's, told apart by the colour-blind too."""

BLACK, GREY, VERMILION, BLUE = "#000000", "#999999", "#D55E00", "#0072B2"
