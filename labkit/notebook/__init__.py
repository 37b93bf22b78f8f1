"""For notebook cells, besides figures: predictions, and the library's source code."""
