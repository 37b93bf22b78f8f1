"""``labkit gpu-report``: everything that a GPU server can show about the course, in one folder.

command       the order of the steps, the time they get, what is kept from an earlier call
steps         what runs: doctor, placements, benches, GPU tests, notebooks
folder        the report's folder: only whole files, and the state of each step
placements    the placements of VGG16 at their published size
run_notebook  a notebook, with its outputs stored elsewhere
page          index.html, from the files of the folder and the CPU records of the repository
"""
