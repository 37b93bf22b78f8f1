// The controls above the picture, in two rows: radio buttons where the choices are few and short,
// menus elsewhere, and the buttons.

import { html, uniqueName } from "./elements.js";
import { resized } from "./split_model.js";

export class Controls {
  /** `choose(changes)` gets the settings that the learner changes, `ask(kind)` the buttons. */
  constructor(state, choose, ask) {
    this.choose = choose;
    this.name = uniqueName(); // radio buttons of two views must not switch each other off
    const { options } = state;
    this.shows = {};
    this.buttons = {};
    const same = (name) => options[name].map((value) => [value, value]);
    this.root = html("div", { class: "controls" },
      html("div", { class: "controls-row" },
        this.radios("stages", "stages", same("stages")),
        this.menu("link", "link between stages", same("link")),
        this.radios("batch_size", "batch", same("batch_size")),
        this.radios("micro_batches", "micro-batches", same("micro_batches")),
        this.radios("schedule", "schedule", same("schedule"))),
      html("div", { class: "controls-row" },
        this.radios("mode", "layers by", [["compute", "compute"], ["bytes", "bytes"]]),
        this.menu("objective", "the best has the", options.objective),
        this.menu("cap_bytes", "a stage holds at most", options.cap_bytes),
        html("div", { class: "buttons" }, this.button("best", "Best split", ask),
          this.button("run", "Run", ask), this.button("stop", "Stop", ask))));
  }

  /** Show the present settings; while the kernel is busy, only Stop can be pressed. */
  draw(state) {
    const values = { ...state, stages: state.points.length + 1 };
    for (const [name, show] of Object.entries(this.shows)) show(values[name]);
    this.buttons.best.disabled = this.buttons.run.disabled = Boolean(state.busy);
    this.buttons.stop.disabled = !state.busy;
  }

  radios(name, label, choices) {
    const group = html("div", { class: "radios", role: "radiogroup", "aria-label": label });
    const inputs = choices.map(([words, value]) => {
      const input = html("input", { type: "radio", name: `${this.name}-${name}` });
      input.addEventListener("change", () => this.change(name, value));
      group.append(html("label", {}, input, html("span", {}, String(words))));
      return input;
    });
    this.shows[name] = (value) =>
      inputs.forEach((input, place) => (input.checked = choices[place][1] === value));
    return html("div", { class: "control" }, html("span", { class: "quiet" }, label), group);
  }

  menu(name, label, choices) {
    const options = choices.map(([words], place) => html("option", { value: place }, words));
    const menu = html("select", {}, ...options);
    menu.addEventListener("change", () => this.change(name, choices[Number(menu.value)][1]));
    this.shows[name] = (value) =>
      (menu.value = String(choices.findIndex(([, offered]) => offered === value)));
    return html("label", { class: "control" }, html("span", { class: "quiet" }, label), menu);
  }

  button(kind, words, ask) {
    const button = html("button", { type: "button" }, words);
    button.addEventListener("click", () => ask(kind));
    this.buttons[kind] = button;
    return button;
  }

  change(name, value) {
    this.choose(name === "stages" ? (state) => ({
      points: resized(state.points, value - 1, state.layers.length),
    }) : (state) => ({ [name]: value, ...inProportion(name, value, state) }));
  }
}

/** Every micro-batch needs a sample: the batch and the micro-batches move each other. */
function inProportion(name, value, { options, batch_size, micro_batches }) {
  if (name === "micro_batches" && batch_size < value) {
    return { batch_size: options.batch_size.find((size) => size >= value) };
  }
  if (name === "batch_size" && micro_batches > value) {
    return { micro_batches: options.micro_batches.findLast((count) => count <= value) };
  }
  return {};
}
