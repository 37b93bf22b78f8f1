"""The split explorer as one picture: layers in a row, and cuts that are dragged.

widget                 the kernel's side: state, Run, Best split
split_picture.js, .css the browser's side; it puts together the other scripts
split_model.js         a predicted step: the arithmetic of ``labkit.placement.planner``
split_row.js           the row of layers, and a handle for each cut
split_lanes.js         the timeline and the memory of each stage, the hops between
split_controls.js      menus, radio buttons and buttons
split_looks.js         colours, hatches, legend
"""
