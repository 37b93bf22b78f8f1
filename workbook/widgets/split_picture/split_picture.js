// The split explorer in the browser: layers in a row, cuts that are dragged, and one step below.
//
// Every move is computed here, from the profile; the kernel is asked only to run and to search.
// Several views of one model show the same state, which the model keeps.

import { Controls } from "./split_controls.js";
import { html, set, svg } from "./elements.js";
import { drawLanes } from "./split_lanes.js";
import { predictSplit, scaled } from "./split_model.js";
import { hatches, legend } from "./split_looks.js";
import { LayerRow } from "./split_row.js";
import { cutsWords, formatBytes, formatCount, formatSeconds } from "./words.js";

const STATE = ["profile", "points", "links", "link", "batch_size", "micro_batches", "schedule",
  "frozen", "objective", "cap_bytes", "mode", "options", "measured", "busy", "status"];
const LEAST_WIDTH = 400;
const SPEAK_MS = 400; // a screen reader is told where a drag has ended, not all of its places

class SplitPicture {
  constructor(model, root) {
    this.model = model;
    this.endS = 0;
    this.controls = new Controls(this.state(), (change) => this.choose(change),
      (kind) => this.ask(kind));
    this.row = new LayerRow((points) => this.choose(() => ({ points })));
    this.lanes = svg("g", { "aria-hidden": "true" });
    this.picture = svg("svg", { class: "picture", role: "group" }, hatches(root), this.row.group,
      this.lanes);
    this.numbers = html("dl", { class: "numbers" });
    this.status = html("div", { class: "status", role: "status" });
    this.spoken = html("div", { class: "spoken", role: "status" });
    root.append(this.controls.root, this.status, this.numbers, this.picture, legend(),
      this.spoken);
  }

  state() {
    const state = Object.fromEntries(STATE.map((name) => [name, this.model.get(name)]));
    return { ...state, layers: state.profile.layers };
  }

  /** Change settings, here and in all other views. */
  choose(changeOf) {
    for (const [name, value] of Object.entries(changeOf(this.state()))) {
      this.model.set(name, value);
    }
    this.model.save_changes();
  }

  ask(kind) {
    this.model.send({ kind });
    this.status.textContent = kind === "stop" ? "stopping ..." : "waiting for the kernel ...";
  }

  draw() {
    const state = this.state();
    const shown = shownOf(state);
    this.controls.draw(state);
    this.status.textContent = state.busy || state.status;
    this.status.classList.toggle("busy", Boolean(state.busy));
    this.drawNumbers(shown);
    const width = Math.max(LEAST_WIDTH, this.width ?? 0);
    const height = this.row.draw(shown, width);
    const below = drawLanes(this.lanes, shown, width, height + 12, this.axisEnd(state, shown));
    const size = { width, height: height + 12 + below };
    set(this.picture, { ...size, viewBox: `0 0 ${width} ${size.height}`,
      "aria-label": titleOf(state) });
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => (this.spoken.textContent = captionOf(shown)), SPEAK_MS);
  }

  /** The end of the time axis: while only cuts move, it grows and never shrinks. */
  axisEnd({ link, batch_size, micro_batches, schedule, points }, { split, measured }) {
    const settings = String([link, batch_size, micro_batches, schedule, points.length]);
    const endS = Math.max(split.step_s, measured?.end_s ?? 0, 1e-9);
    if (settings !== this.settings || endS > this.endS) this.endS = 1.1 * endS;
    this.settings = settings;
    return this.endS;
  }

  drawNumbers({ split, measured }) {
    const largestS = Math.max(...split.forward_s.map((s, i) => s + split.backward_s[i]));
    const percent = (share) => `${Math.round(100 * share)} %`;
    const rows = [
      ["step", formatSeconds(split.step_s), measured && formatSeconds(measured.step_s)],
      ["bubble: stages idle", percent(split.bubble), measured && percent(measured.bubble)],
      ["largest stage", formatSeconds(largestS), measured && formatSeconds(measured.largest_s)],
      ["all hops", formatSeconds(hopSeconds(split)), measured && formatSeconds(measured.hops_s)],
      ["bytes of a step", formatBytes(sentBytes(split))],
    ];
    this.numbers.replaceChildren(...rows.map(([name, model, run]) => html("div", {},
      html("dt", { class: "quiet" }, name), html("dd", {}, model),
      ...(run ? [html("dd", { class: "quiet" }, `measured ${run}`)] : []))));
  }
}

/** What the picture shows of a state: the prediction, and what was measured of this split. */
function shownOf(state) {
  const profile = scaled(state.profile, state.batch_size);
  const { alpha_s, beta_s_per_byte } = state.links[state.link];
  const settings = [state.micro_batches, state.schedule, state.frozen];
  const link = { alpha_s, beta_s_per_byte };
  const whole = predictSplit(profile, [], link, 1, "gpipe", state.frozen);
  const isThis = (run) => String(run.points) === String(state.points)
    && run.batch_size === state.batch_size && run.micro_batches === state.micro_batches
    && run.schedule === state.schedule;
  return {
    points: state.points,
    layers: profile.layers,
    mode: state.mode,
    frozen: state.frozen,
    capBytes: state.cap_bytes,
    wholeBytes: whole.memory_bytes[0],
    split: predictSplit(profile, state.points, link, ...settings),
    measured: state.measured.findLast(isThis),
  };
}

function titleOf(state) {
  const stages = formatCount(state.points.length + 1, "stage");
  return `${state.profile.model} in ${stages} over ${state.link}, batch of ${state.batch_size}`;
}

function hopSeconds(split) {
  return split.hop_s.reduce(
    (sum, seconds, cut) => sum + seconds * (cut >= split.first_trained ? 2 : 1), 0);
}

/** Over all cuts, in both directions. */
function sentBytes(split) {
  return split.hop_bytes.reduce(
    (sum, bytes, cut) => sum + bytes * (cut >= split.first_trained ? 2 : 1), 0);
}

function captionOf({ split, measured, points }) {
  const parts = [`${cutsWords(points)}. Model: the step takes ${formatSeconds(split.step_s)}`];
  parts.push(`${formatSeconds(hopSeconds(split))} of hops`);
  parts.push(`stages are idle for ${Math.round(100 * split.bubble)} %`);
  if (measured) parts.push(`measured ${formatSeconds(measured.step_s)}`);
  return `${parts.join(", ")}.`;
}

export default {
  render({ model, el }) {
    const root = html("div", { class: "labkit-split", "data-lm-suppress-shortcuts": "true" });
    el.append(root);
    const view = new SplitPicture(model, root);
    const changes = STATE.map((name) => `change:${name}`).join(" ");
    const draw = () => view.draw();
    model.on(changes, draw);
    // Not drawn before its width is known, and again whenever that changes.
    const sizes = new ResizeObserver(([{ contentRect }]) => {
      if (!contentRect.width || contentRect.width === view.width) return;
      view.width = contentRect.width;
      draw();
    });
    sizes.observe(root);
    return () => {
      sizes.disconnect();
      model.off(changes, draw);
      clearTimeout(view.speaking);
    };
  },
};
