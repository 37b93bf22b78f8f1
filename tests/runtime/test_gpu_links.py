"""The matrix of ``nvidia-smi topo`` is read from any driver, and drawn at any width."""

import pytest

from labkit.doctor import WIDTH
from labkit.runtime.gpu_links import Topology, Unanswered, picture, read_topology, spoken


@pytest.mark.parametrize("text", ["", "topo: unknown option", "\tGPU0\tGPU1\nGPU0\t X \n"])
def test_rubbish_is_no_topology(text):
    with pytest.raises(Unanswered, match="nvidia-smi"):
        read_topology(text)


@pytest.mark.parametrize("end", ["", "\tCPU Affinity", "\tCPU Affinity\tNUMA Affinity"])
def test_matrices_of_older_drivers_are_read(end):
    text = (
        f"\tGPU0\tGPU1\tmlx4_0{end}\nGPU0\t X \tSOC\tPHB\t0-7\t0\nGPU1\tSOC\t X \tSOC\t8-15\t1\n"
    )
    links = read_topology(text)
    assert links.pairs() == {(0, 1): "SOC"}
    assert links.links[0, "mlx4_0"] == "PHB"


@pytest.mark.parametrize("count", [1, 2, 8, 12, 16])
def test_pictures_of_any_width_fit(count):
    links = {(a, b): "NV18" for a in range(count) for b in range(count) if a != b}
    links |= {(a, f"mlx5_{n}"): "SYS" if n % 2 else "PIX" for a in range(count) for n in range(18)}
    drawn = picture(Topology(links, dict.fromkeys(range(count), "0-127")))
    rows = drawn.splitlines()[: count + 1]
    assert len({len(row) for row in rows}) == 1
    assert max(map(len, rows)) <= WIDTH - 4


def test_an_unknown_way_is_still_drawn():
    links = read_topology("\tGPU0\tGPU1\nGPU0\t X \tC2C\nGPU1\tC2C\t X \n")
    assert "C2C    on a way that nvidia-smi calls C2C" in picture(links)


def test_numbers_are_spoken_as_ranges():
    assert spoken([3]) == "GPU 3"
    assert spoken([5, 0, 1, 2]) == "GPUs 0-2, 5"
