"""For notebook cells, besides figures: predictions, the library's source code, and live runs.

predict, display   predictions; source code
live               a cell while ranks run: its lanes (lanes, lane_picture), losses and rates
"""
