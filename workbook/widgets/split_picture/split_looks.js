// The look of each meaning, as in workbook/plots/palette.py: a colour and a hatch. What is measured
// is filled, what is predicted pale with slanted lines. The colours are in split_picture.css.

import { html, svg, uniqueName } from "./elements.js";

const KINDS = ["forward", "backward", "activation", "gradient", "memory"];
const MARKS = {
  forward: "M2 0V6",
  backward: "M0 2H6",
  activation: "M1 2h1.4M4 5h1.4",
  gradient: "M0 2H6",
  memory: "",
};

const TILE = { width: 6, height: 6, patternUnits: "userSpaceOnUse" };

/** Patterns for all kinds. The CSS finds them through variables of `root`: a pattern is hidden
 * together with the view it belongs to, so each view needs a set. */
export function hatches(root) {
  const name = uniqueName();
  return svg("defs", {}, ...KINDS.flatMap((kind) => {
    for (const look of ["model", "measured"]) {
      root.style.setProperty(`--${kind}-${look}`, `url(#${name}-${kind}-${look})`);
    }
    const pale = svg("rect", { width: 6, height: 6, class: `pale ${kind}` });
    const full = svg("rect", { width: 6, height: 6, class: `full ${kind}` });
    return [
      svg("pattern", { ...TILE, id: `${name}-${kind}-model`, patternTransform: "rotate(45)" },
        pale, svg("path", { d: "M1 0V6", class: `slanted ${kind}` })),
      svg("pattern", { ...TILE, id: `${name}-${kind}-measured` },
        full, svg("path", { d: MARKS[kind], class: `ink ${kind}` })),
    ];
  }));
}

/** What the colours mean, below the picture. */
export function legend() {
  const swatch = (kind, look) => svg("svg", { width: 22, height: 12 },
    svg("rect", { class: `${look} ${kind}`, width: 22, height: 12 }));
  const entries = KINDS.map((kind) => html("span", {}, swatch(kind, "model"), kind));
  return html("div", { class: "legend quiet" }, ...entries,
    html("span", {}, "hatched: the model"), html("span", {}, swatch("forward", "measured"),
      "filled: measured by Run"));
}
