"""What an explorer shows, and what it draws."""

import html
import re


def alt_of(explorer):
    (alt,) = re.findall(r'<img alt="([^"]+)"', explorer.view.value)
    return html.unescape(alt)


def drawings(explorer):
    """What is chosen for each figure that is drawn from now on."""
    drawn, draw = [], explorer.draw

    def counted(*chosen):
        drawn.append(chosen)
        return draw(*chosen)

    explorer.draw = counted
    return drawn
