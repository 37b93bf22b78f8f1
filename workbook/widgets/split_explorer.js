// The split explorer in the browser: layers in a row, cuts that are dragged, and one step below.
//
// The browser moves the cuts. Every number and word comes from the kernel, in `shown`; until it is
// of the present cuts, the step is pale. Several views of one model show the same state.

const STATE = ["points", "mode", "shown"];
const SPEAK_MS = 400; // a screen reader is told where a drag has ended, not all of its places
const ROW = 23; // each handle has a row, so that none hides another
const HEIGHT = 76; // of a layer
const LEAST = 4; // pixels: no layer is too narrow to be cut off
const PAGE = 5; // layers per PageUp
// Heights of a stage, of its measured bars and of a hop; pixels for names, memory and its bars.
const [STAGE, MEASURED, HOP, GAP, LINE] = [22, 16, 20, 3, 16];
const [NAMES, MEMORY, BAR] = [92, 176, 92];

// As in workbook/plots/palette.py; the colours are in split_explorer.css.
const MARKS = {
  forward: "M2 0V6",
  backward: "M0 2H6",
  activation: "M1 2h1.4M4 5h1.4",
  gradient: "M0 2H6",
  memory: "",
};
const TILE = { width: 6, height: 6, patternUnits: "userSpaceOnUse" };

/** An SVG element with attributes, and children or text. */
function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function filled(element, attributes, children) {
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** Points with one cut moved; the others move as far as needed to leave each stage a layer. */
function pushed(points, cut, wanted, numLayers) {
  const last = points.length - 1;
  const moved = [...points];
  moved[cut] = Math.min(Math.max(wanted, cut + 1), numLayers - 1 - (last - cut));
  for (let i = cut + 1; i <= last; i++) moved[i] = Math.max(moved[i], moved[i - 1] + 1);
  for (let i = cut - 1; i >= 0; i--) moved[i] = Math.min(moved[i], moved[i + 1] - 1);
  return moved;
}

/** The layers in a row, and a handle at each cut. The handles stay the same elements while they
 * move, so that they keep the pointer and the keyboard's focus. */
class LayerRow {
  /** `move(points)` is called with the split points that the learner chooses. */
  constructor(move) {
    this.move = move;
    this.layers = svg("g", { "aria-hidden": "true" });
    this.stages = svg("g", { "aria-hidden": "true", class: "stages" });
    this.cuts = svg("g", {});
    this.group = svg("g", {}, this.layers, this.stages, this.cuts);
    this.handles = [];
  }

  /** Draw the row `width` pixels wide; returns its height. */
  draw({ points, mode, shown }, width) {
    Object.assign(this, { points, mode, all: shown.layers });
    while (this.handles.length < points.length) this.addHandle(this.handles.length);
    while (this.handles.length > points.length) this.handles.pop().group.remove();
    this.top = points.length * ROW + 4;
    this.setEdges(width);
    this.drawLayers();
    this.drawStages();
    this.handles.forEach((handle, cut) => this.place(handle, cut, width));
    return this.top + HEIGHT + 20;
  }

  /** Where each layer begins, and where the last one ends, in pixels from the left. */
  setEdges(width) {
    const seconds = this.all.map((layer) => layer.seconds);
    const sum = seconds.reduce((one, other) => one + other, 0);
    const least = Math.min(LEAST, width / seconds.length);
    const free = width - least * seconds.length;
    this.edges = [0];
    for (const one of seconds) {
      const share = this.mode === "bytes" || !sum ? 1 / seconds.length : one / sum;
      this.edges.push(this.edges.at(-1) + least + free * share);
    }
  }

  drawLayers() {
    const byBytes = this.mode === "bytes";
    const most = Math.max(...this.all.map(({ bytes }) => bytes), 1);
    this.layers.replaceChildren(...this.all.map(({ name, bytes, words }, i) => {
      const [left, right] = [this.edges[i], this.edges[i + 1]];
      const height = byBytes ? Math.max(1, (HEIGHT * bytes) / most) : HEIGHT;
      const stage = this.points.filter((point) => point <= i).length;
      const sends = this.points.includes(i + 1);
      const look = byBytes ? `bytes ${sends ? "sends" : ""}` : `compute ${stage % 2 ? "odd" : ""}`;
      const place = { x: left + 0.5, y: this.top + HEIGHT - height, width: right - left - 1 };
      const bar = svg("rect", { ...place, class: look, height }, svg("title", {}, words));
      if (right - left < 13) return bar;
      const [x, y] = [(left + right) / 2 + 4, this.top + HEIGHT - 4];
      const text = name.length > 13 ? `${name.slice(0, 12)}…` : name;
      const turned = { class: "name", transform: `translate(${x} ${y}) rotate(-90)` };
      return svg("g", {}, bar, svg("text", turned, text));
    }));
  }

  drawStages() {
    const y = this.top + HEIGHT + 5;
    const ends = [...this.points, this.all.length];
    this.stages.replaceChildren(...ends.flatMap((end, stage) => {
      const start = stage ? ends[stage - 1] : 0;
      const [left, right] = [this.edges[start] + 1, this.edges[end] - 1];
      const count = `${end - start} layer${end - start === 1 ? "" : "s"}`;
      const words = [`stage ${stage}: ${count}`, `stage ${stage}`, String(stage)];
      const text = words.find((word) => word.length * 7 < right - left) ?? "";
      const middle = { x: (left + right) / 2, y: y + 12, "text-anchor": "middle" };
      return [svg("path", { d: `M${left} ${y - 3}v3H${right}v-3` }), svg("text", middle, text)];
    }));
  }

  addHandle(cut) {
    const line = svg("line", {});
    const grip = svg("rect", { class: "grip", x: -13, width: 26, height: ROW - 4, rx: 5 });
    const mark = svg("path", { class: "mark" });
    const hit = svg("rect", { class: "hit", x: -7, width: 14 });
    const label = svg("text", { class: "label" });
    const group = svg("g", { class: "cut", role: "slider", tabindex: 0,
      "aria-label": `cut ${cut + 1}`, "aria-valuemin": cut + 1, "aria-orientation": "horizontal" },
    line, hit, grip, mark, label);
    group.addEventListener("keydown", (event) => this.press(event, cut));
    group.addEventListener("pointerdown", (event) => this.grab(event, cut));
    this.handles.push({ group, line, grip, mark, hit, label });
    this.cuts.append(group);
  }

  place({ group, line, grip, mark, hit, label }, cut, width) {
    const point = this.points[cut];
    const { name } = this.all[point];
    label.textContent = `cut before ${point}: ${name} · ${this.all[point - 1].sends}`;
    const isLeft = this.edges[point] + 7 * label.textContent.length > width;
    // The words are on the side, and the rows in the order, where no other cut's line crosses them.
    if (!cut) this.isFlipped = isLeft;
    const row = this.isFlipped ? this.points.length - 1 - cut : cut;
    const [x, y, bottom] = [this.edges[point], row * ROW, this.top + HEIGHT];
    set(group, {
      transform: `translate(${x} 0)`,
      "aria-valuenow": point,
      "aria-valuemax": this.all.length - this.points.length + cut,
      "aria-valuetext": `before layer ${point}, ${name}`,
    });
    set(line, { y1: y + 2, y2: bottom });
    set(grip, { y: y + 2 });
    set(mark, { d: `M-4 ${y + 8}l-4 4l4 4M4 ${y + 8}l4 4l-4 4` });
    set(hit, { y: y + 2, height: bottom - y });
    set(label, { x: isLeft ? -19 : 19, y: y + 16, "text-anchor": isLeft ? "end" : "start" });
  }

  press(event, cut) {
    const last = this.all.length;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -PAGE,
      PageUp: PAGE, Home: -last, End: last };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(pushed(this.points, cut, this.points[cut] + steps[event.key], last));
  }

  /** Follow the pointer until it is let go: other handles that were pushed come back, too. */
  grab(event, cut) {
    if (event.button !== 0) return;
    event.preventDefault();
    const { group } = this.handles[cut];
    const start = this.points;
    const from = event.clientX - this.edges[start[cut]];
    group.focus({ preventScroll: true });
    group.setPointerCapture(event.pointerId);
    const drag = (moved) => {
      const distances = this.edges.map((edge) => Math.abs(edge - (moved.clientX - from)));
      const wanted = distances.indexOf(Math.min(...distances));
      const points = pushed(start, cut, wanted, this.all.length);
      if (String(points) !== String(this.points)) this.move(points);
    };
    const end = () => group.removeEventListener("pointermove", drag);
    group.addEventListener("pointermove", drag);
    group.addEventListener("lostpointercapture", end, { once: true });
  }
}

/** The look of what is predicted (`predicted`) or `measured`. */
function bar(kind, look) {
  return { class: `${look} ${kind}`, style: `fill: var(--${kind}-${look})` };
}

/** Draw the step as a table: a row per stage with its timeline and its memory, a row per hop
 * between. What was measured is below what was predicted. Returns the height. */
function drawLanes(group, { stages, hops, ends, ticks, end_s }, width, top) {
  const pixels = (width - NAMES - MEMORY - 20) / end_s;
  const at = (seconds) => NAMES + seconds * pixels;
  const left = width - MEMORY;
  const bars = (spans, look, y, height) => spans.map(([kind, start, end]) => svg("rect", {
    ...bar(kind, look), x: at(start), y, height, width: Math.max(0.7, (end - start) * pixels),
  }));
  const memory = ([share, words], look, y, height) => [
    svg("rect", { ...bar("memory", look), x: left, y, height, width: BAR * share }),
    svg("text", { x: left + BAR + 6, y: y + height - 4, class: "row" }, words)];
  let y = top + 18 + (ends.length - 1) * LINE;
  const parts = [svg("text", { x: 0, y: top + 12, class: "quiet" }, "one step"),
    svg("text", { x: left, y: y - 6, class: "quiet" }, "memory; over each cut")];
  for (const [stage, { range, predicted, measured }] of stages.entries()) {
    parts.push(svg("text", { x: 0, y: y + 14, class: "row" }, `stage ${stage}`));
    parts.push(svg("text", { x: 52, y: y + 14, class: "quiet" }, range));
    parts.push(...bars(predicted.spans, "predicted", y, STAGE - GAP));
    parts.push(...memory(predicted.memory, "predicted", y, STAGE - GAP));
    y += STAGE;
    if (measured) {
      parts.push(...bars(measured.spans, "measured", y, MEASURED - GAP));
      parts.push(...memory(measured.memory, "measured", y, MEASURED - GAP));
      y += MEASURED;
    }
    if (stage < hops.length) {
      const { name, words, spans } = hops[stage];
      parts.push(svg("text", { x: 0, y: y + 13, class: "quiet" }, name));
      parts.push(svg("text", { x: left, y: y + 13, class: "quiet" }, words));
      parts.push(...bars(spans, "predicted", y + GAP, HOP - 3 * GAP));
      y += HOP;
    }
  }
  parts.push(svg("path", { class: "axis", d: `M${at(0)} ${y + 2}H${at(end_s)}` }));
  for (const [seconds, words] of ticks) {
    const x = at(seconds);
    parts.push(svg("path", { class: "axis", d: `M${x} ${y + 2}v4` }));
    parts.push(svg("text", { x, y: y + 18, class: "quiet", "text-anchor": "middle" }, words));
  }
  for (const [row, [look, seconds, words]] of ends.entries()) {
    const x = at(seconds);
    const isLeft = x > at(0) + 130;
    const place = { x: x + (isLeft ? -5 : 5), y: top + 12 + row * LINE, class: "row" };
    parts.push(svg("path", { class: `end ${look}`, d: `M${x} ${place.y - 10}V${y + 2}` }));
    parts.push(svg("text", { ...place, "text-anchor": isLeft ? "end" : "start" }, words));
  }
  group.replaceChildren(...parts);
  return y + 22 - top;
}

/** Patterns for all kinds. Bars find them through variables of `root`: a pattern is hidden
 * together with the view it belongs to, so each view needs a set. */
function hatches(root) {
  const name = `labkit-${Math.random().toString(36).slice(2)}`;
  return svg("defs", {}, ...Object.entries(MARKS).flatMap(([kind, mark]) => {
    for (const look of ["predicted", "measured"]) {
      root.style.setProperty(`--${kind}-${look}`, `url(#${name}-${kind}-${look})`);
    }
    const tile = (look) => svg("rect", { width: 6, height: 6, class: `${look} ${kind}` });
    return [
      svg("pattern", { ...TILE, id: `${name}-${kind}-predicted`, patternTransform: "rotate(45)" },
        tile("pale"), svg("path", { d: "M1 0V6", class: `slanted ${kind}` })),
      svg("pattern", { ...TILE, id: `${name}-${kind}-measured` },
        tile("full"), svg("path", { d: mark, class: `ink ${kind}` })),
    ];
  }));
}

/** What the colours mean, below the picture. */
function legend() {
  const swatch = (kind, look) => svg("svg", { width: 22, height: 12 },
    svg("rect", { ...bar(kind, look), width: 22, height: 12 }));
  const kinds = Object.keys(MARKS).map((kind) => html("span", {}, swatch(kind, "predicted"), kind));
  return html("div", { class: "legend quiet" }, ...kinds, html("span", {}, "hatched: predicted"),
    html("span", {}, swatch("forward", "measured"), "filled: measured by Run"));
}

class SplitPicture {
  constructor(model, root) {
    this.model = model;
    this.row = new LayerRow((points) => {
      model.set("points", points);
      model.save_changes();
    });
    this.lanes = svg("g", { "aria-hidden": "true" });
    this.picture = svg("svg", { class: "picture", role: "group" }, hatches(root), this.row.group,
      this.lanes);
    this.spoken = html("div", { class: "spoken", role: "status" });
    root.append(this.picture, legend(), this.spoken);
  }

  draw() {
    const state = Object.fromEntries(STATE.map((name) => [name, this.model.get(name)]));
    const { points, shown } = state;
    const width = Math.max(620, this.width ?? 0);
    const height = this.row.draw(state, width) + 12;
    const below = drawLanes(this.lanes, shown, width, height);
    this.lanes.classList.toggle("late", String(shown.points) !== String(points));
    set(this.picture, { width, height: height + below, "aria-label": shown.title,
      viewBox: `0 0 ${width} ${height + below}` });
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => (this.spoken.textContent = shown.caption), SPEAK_MS);
  }
}

export default {
  render({ model, el }) {
    const root = html("div", { class: "labkit-split", "data-lm-suppress-shortcuts": "true" });
    el.append(root);
    const view = new SplitPicture(model, root);
    const events = STATE.map((name) => `change:${name}`).join(" ");
    const draw = () => view.draw();
    model.on(events, draw);
    // Not drawn before its width is known, and again whenever that changes.
    const sizes = new ResizeObserver(([{ contentRect }]) => {
      if (!contentRect.width || contentRect.width === view.width) return;
      view.width = contentRect.width;
      draw();
    });
    sizes.observe(root);
    return () => {
      sizes.disconnect();
      model.off(events, draw);
      clearTimeout(view.speaking);
    };
  },
};
