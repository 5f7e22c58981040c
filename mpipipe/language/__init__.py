"""Models of language: their layers and folders, the data they are trained on, and text from them."""
