// The layers in a row, and a handle at each cut. The handles stay the same elements while they
// move, so that they keep the pointer and the keyboard's focus.

import { set, svg } from "./elements.js";
import { pushed, stageBounds } from "./split_model.js";
import { formatBytes, formatCount, formatSeconds } from "./words.js";

const ROW = 23; // each handle has a row, so that none hides another
const HEIGHT = 76;
const STAGES = 20;
const LEAST = 4; // pixels: no layer is too narrow to be cut off
const PAGE = 5; // layers per PageUp

export class LayerRow {
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
  draw(shown, width) {
    this.shown = shown;
    const { points } = shown;
    while (this.handles.length < points.length) this.addHandle(this.handles.length);
    while (this.handles.length > points.length) this.handles.pop().group.remove();
    this.top = points.length * ROW + 4;
    this.edges = edgesOf(shown, width);
    this.drawLayers();
    this.drawStages();
    this.handles.forEach((handle, cut) => this.place(handle, cut, width));
    return this.top + HEIGHT + STAGES;
  }

  drawLayers() {
    const { layers, points, mode } = this.shown;
    const byBytes = mode === "bytes";
    const most = Math.max(...layers.map((layer) => layer.output_bytes), 1);
    this.layers.replaceChildren(...layers.map((layer, i) => {
      const [left, right] = [this.edges[i], this.edges[i + 1]];
      const height = byBytes ? Math.max(1, (HEIGHT * layer.output_bytes) / most) : HEIGHT;
      const stage = points.filter((point) => point <= i).length;
      const sends = points.includes(i + 1);
      const kind = byBytes ? `bytes ${sends ? "sends" : ""}` : `compute ${stage % 2 ? "odd" : ""}`;
      const place = { x: left + 0.5, y: this.top + HEIGHT - height };
      const bar = svg("rect", { ...place, class: kind, width: right - left - 1, height },
        svg("title", {}, layerWords(layer, i)));
      const isWide = right - left >= 13;
      return isWide ? svg("g", {}, bar, this.name(layer, left, right)) : bar;
    }));
  }

  name(layer, left, right) {
    const [x, y] = [(left + right) / 2 + 4, this.top + HEIGHT - 4];
    const text = layer.name.length > 13 ? `${layer.name.slice(0, 12)}…` : layer.name;
    return svg("text", { class: "name", transform: `translate(${x} ${y}) rotate(-90)` }, text);
  }

  drawStages() {
    const y = this.top + HEIGHT + 5;
    const { points, layers } = this.shown;
    const bounds = stageBounds(points, layers.length);
    this.stages.replaceChildren(...bounds.flatMap(([start, end], stage) => {
      const [left, right] = [this.edges[start] + 1, this.edges[end] - 1];
      const words = [`stage ${stage}: ${formatCount(end - start, "layer")}`, `stage ${stage}`,
        String(stage)];
      const text = words.find((word) => word.length * 7 < right - left) ?? "";
      const d = `M${left} ${y - 3}v3H${right}v-3`;
      const middle = { x: (left + right) / 2, y: y + 12, "text-anchor": "middle" };
      return [svg("path", { d }), svg("text", middle, text)];
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
    const { points, layers } = this.shown;
    const point = points[cut];
    const [x, y, bottom] = [this.edges[point], cut * ROW, this.top + HEIGHT];
    set(group, {
      transform: `translate(${x} 0)`,
      "aria-valuenow": point,
      "aria-valuemax": layers.length - points.length + cut,
      "aria-valuetext": `before layer ${point}, ${layers[point].name}`,
    });
    set(line, { y1: y + 2, y2: bottom });
    set(grip, { y: y + 2 });
    set(mark, { d: `M-4 ${y + 8}l-4 4l4 4M4 ${y + 8}l4 4l-4 4` });
    set(hit, { y: y + 2, height: bottom - y });
    const sent = formatBytes(layers[point - 1].output_bytes);
    label.textContent = `cut before ${point}: ${layers[point].name} · ${sent}`;
    // On the right no other cut's line crosses the words.
    const isLeft = x + 7 * label.textContent.length > width;
    set(label, { x: isLeft ? -19 : 19, y: y + 16, "text-anchor": isLeft ? "end" : "start" });
  }

  press(event, cut) {
    const { points, layers } = this.shown;
    const last = layers.length;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -PAGE,
      PageUp: PAGE, Home: -last, End: last };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(pushed(points, cut, points[cut] + steps[event.key], last));
  }

  /** Follow the pointer until it is let go: other handles that were pushed come back, too. */
  grab(event, cut) {
    if (event.button !== 0) return;
    event.preventDefault();
    const { group } = this.handles[cut];
    const start = this.shown.points;
    const from = event.clientX - this.edges[start[cut]];
    group.focus({ preventScroll: true });
    group.setPointerCapture(event.pointerId);
    const drag = (moved) => {
      const wanted = nearest(this.edges, moved.clientX - from);
      const points = pushed(start, cut, wanted, this.shown.layers.length);
      if (String(points) !== String(this.shown.points)) this.move(points);
    };
    const end = () => group.removeEventListener("pointermove", drag);
    group.addEventListener("pointermove", drag);
    group.addEventListener("lostpointercapture", end, { once: true });
  }
}

/** Where each layer begins, and where the last one ends, in pixels from the left. */
function edgesOf({ layers, mode, frozen }, width) {
  const seconds = layers.map((l, i) => l.forward_s + (i < frozen ? 0 : l.backward_s));
  const all = seconds.reduce((sum, one) => sum + one, 0);
  const least = Math.min(LEAST, width / layers.length);
  const free = width - least * layers.length;
  const edges = [0];
  for (const one of seconds) {
    const share = mode === "bytes" || !all ? 1 / layers.length : one / all;
    edges.push(edges.at(-1) + least + free * share);
  }
  return edges;
}

/** The number of the edge nearest to `x`. */
function nearest(edges, x) {
  const distances = edges.map((edge) => Math.abs(edge - x));
  return distances.indexOf(Math.min(...distances));
}

function layerWords(layer, i) {
  const parts = [`forward ${formatSeconds(layer.forward_s)}`];
  parts.push(`backward ${formatSeconds(layer.backward_s)}`);
  parts.push(`output ${formatBytes(layer.output_bytes)}`);
  parts.push(`parameters ${formatBytes(layer.parameter_bytes)}`);
  return `layer ${i}, ${layer.name}: ${parts.join(", ")}`;
}
