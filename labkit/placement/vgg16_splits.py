"""Split points of labkit's vgg16, to compare.

Layers 0 to 30 are the features (4, 9, 16, 23 and 30 are pools), 31 averages, 32 flattens, 33
classifies. The first four splits are those of the experiment that the course corrects, which did
not consider the bytes over each cut; the others use as many devices and cut at other layers.
"""

VGG16_SPLITS: dict[str, tuple[int, ...]] = {
    "1 device": (),
    "2 devices": (31,),
    "3 devices": (31, 33),
    "4 devices": (15, 31, 33),
    "2 devices, after pool 1": (5,),
    "2 devices, after pool 2": (10,),
    "2 devices, after pool 3": (17,),
    "2 devices, after pool 4": (24,),
    "3 devices, after pools 2 and 3": (10, 17),
    "4 devices, after pools 2, 3 and 4": (10, 17, 24),
    "4 devices, even compute": (7, 14, 21),
}
