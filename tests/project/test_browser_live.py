"""A cell while ranks run, in a browser: the lanes fill, and stay as the timeline of the run."""

import pytest

pytestmark = pytest.mark.browser

SETUP = """
import os
os.environ["LABKIT_LIVE"] = "1"
import time, torch, labkit, workbook
labkit.warm_up(training=False)
labkit.run(lambda comm: comm.rank, world_size=2).values
"""
LIVE = """
def work(comm):
    for step in range(40):
        with comm.span("compute"):
            time.sleep(0.05 + 0.02 * comm.rank)
        labkit.collectives.ring_all_reduce(comm, torch.ones(1000))
        comm.progress(step + 1, 40, "steps", samples=8, loss=1 / (step + 1))
        print(f"step {step}", end="\\r")
    print()

labkit.run(work, world_size=2).values
"""
LANES = 'svg[aria-label^="Live timeline of 2 ranks"]'
READ = """
selector => {
  const svg = document.querySelector(selector);
  const paths = [...svg.querySelectorAll('path')].map(path => path.getAttribute('d')).join();
  return {paths, words: svg.textContent};
}
"""
GROWS = f"""
([selector, before]) =>
  document.querySelector(selector) && ({READ})(selector).paths != before
"""


def test_lanes_fill_while_ranks_run_and_end_as_the_timeline(lab):
    lab.add("live.ipynb", SETUP, LIVE)
    page = lab.open("live.ipynb")
    page.start_all()
    page.window.locator(LANES).wait_for(timeout=60_000)
    early = page.window.evaluate(READ, LANES)
    # Its outlines have changed while the cell still runs.
    page.window.wait_for_function(GROWS, arg=[LANES, early["paths"]])
    words = page.window.evaluate(READ, LANES)["words"]
    page.finish()
    assert "rank 1" in words
    assert "loss" in words
    assert "samples/s" in words
    assert "of 40 steps" in words
    assert page.window.locator(LANES).count() == 0
    figure = page.wait_for_image(1, "Timeline of 2 ranks", "; rank 1")
    assert figure["source"].startswith("data:image/svg+xml")
    assert "[rank 0] step 39\n[rank 1] step 39" in page.cells()[1]["text"]
    assert not page.problems()
    page.close()
