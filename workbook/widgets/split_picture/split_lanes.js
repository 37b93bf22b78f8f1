// One step as a table: a row per stage with its timeline and its memory, a row per hop between.
// What the model predicts is hatched; what was measured is solid, below it.

import { svg } from "./elements.js";
import { stageBounds } from "./split_model.js";
import { formatBytes, formatNumber, formatSeconds, secondUnit } from "./words.js";

// Pixels for the names of the rows, for the memory, and for the longest bar of memory.
const WIDE = { names: 92, memory: 176, bar: 92, eachWay: " each way,",
  title: "memory of the stage" };
const NARROW = { names: 52, memory: 118, bar: 40, eachWay: " ⇄", title: "memory" };
const STAGE = 22;
const MEASURED = 16;
const HOP = 20;
const GAP = 3;
const LINE = 16;

/** Draw the step of `shown.split`, and of `shown.measured` if there is one; returns the height. */
export function drawLanes(group, shown, width, top, endS) {
  const { split, measured, layers } = shown;
  const room = width < 620 ? NARROW : WIDE;
  const pixels = (width - room.names - room.memory - 20) / endS;
  const at = (seconds) => room.names + seconds * pixels;
  const parts = [];
  let y = top + 18 + (measured ? LINE : 0);
  const rows = [];
  for (const [stage, bound] of stageBounds(split.split_points, layers.length).entries()) {
    rows.push(y);
    parts.push(...stageName(stage, bound, y, room));
    parts.push(...bars(split.slots.filter((s) => s.stage === stage), "model", at, y, STAGE - GAP));
    y += STAGE;
    if (measured) {
      const spans = measured.spans.filter((span) => span.stage === stage);
      parts.push(...bars(spans, "measured", at, y, MEASURED - GAP));
      y += MEASURED;
    }
    if (stage < split.hop_bytes.length) {
      const sent = split.transfers.filter(({ cut }) => cut === stage);
      parts.push(...hopWords(split, stage, y + 13, width, room));
      parts.push(...bars(sent, "model", at, y + 3, HOP - 2 * GAP - 3));
      y += HOP;
    }
  }
  parts.push(...memory(shown, width, rows, room));
  parts.push(...axis(at, endS, top, y), ...stepEnds(shown, at, top, y));
  group.replaceChildren(...parts);
  return y + 22 - top;
}

function stageName(stage, [start, end], y, room) {
  const range = end === start + 1 ? `${start}` : `${start}–${end - 1}`;
  const name = svg("text", { x: 0, y: y + 14, class: "row" }, `stage ${stage}`);
  return room === NARROW ? [name] : [name, svg("text", { x: 52, y: y + 14, class: "quiet" }, range)];
}

function bars(spans, look, at, y, height) {
  return spans.map(({ kind, start_s, end_s }) => svg("rect", {
    class: `${look} ${kind}`, x: at(start_s), y, height,
    width: Math.max(0.7, (end_s - start_s) * (at(1) - at(0))),
  }));
}

function hopWords(split, cut, y, width, room) {
  const isTwoWay = cut >= split.first_trained;
  const seconds = formatSeconds(split.hop_s[cut] * (isTwoWay ? 2 : 1));
  const words = `${formatBytes(split.hop_bytes[cut])}${isTwoWay ? room.eachWay : ","} ${seconds}`;
  return [svg("text", { x: 0, y, class: "quiet" }, `cut ${split.split_points[cut]}`),
    svg("text", { x: width - room.memory, y, class: "quiet" }, words)];
}

function memory({ split, measured, capBytes, wholeBytes }, width, rows, room) {
  const left = width - room.memory;
  const all = Math.max(wholeBytes, capBytes ?? 0, ...(measured?.memory_bytes ?? [])) || 1;
  const bar = (bytes, look, y, height) => {
    const isOver = capBytes !== null && bytes > capBytes;
    const size = { x: left, y, height, width: (room.bar * bytes) / all };
    const text = `${formatBytes(bytes)}${isOver ? " !" : ""}`;
    return [svg("rect", { ...size, class: `${look} memory ${isOver ? "over" : ""}` }),
      svg("text", { x: left + room.bar + 6, y: y + height - 4, class: isOver ? "over" : "row" }, text)];
  };
  const parts = [svg("text", { x: left, y: rows[0] - 6, class: "quiet" }, room.title)];
  for (const [stage, y] of rows.entries()) {
    parts.push(...bar(split.memory_bytes[stage], "model", y, STAGE - GAP));
    if (measured) parts.push(...bar(measured.memory_bytes[stage], "measured", y + STAGE, 13));
  }
  if (capBytes === null) return parts;
  const x = left + (room.bar * capBytes) / all;
  const length = STAGE + (measured ? MEASURED : 0);
  return [...parts, ...rows.map((y) => svg("path", { class: "cap", d: `M${x} ${y - 3}v${length}` }))];
}

/** The seconds below the lanes. */
function axis(at, endS, top, y) {
  const [scale, unit] = secondUnit(endS);
  const rough = endS / scale / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough);
  const parts = [svg("path", { class: "axis", d: `M${at(0)} ${y + 2}H${at(endS)}` })];
  for (let tick = 0; tick * step * scale <= endS * 1.0001; tick++) {
    const x = at(tick * step * scale);
    const words = `${formatNumber(tick * step)}${tick ? "" : ` ${unit}`}`;
    parts.push(svg("path", { class: "axis", d: `M${x} ${y + 2}v4` }));
    parts.push(svg("text", { x, y: y + 18, class: "quiet", "text-anchor": "middle" }, words));
  }
  return [svg("text", { x: 0, y: top + 12, class: "quiet" }, "one step"), ...parts];
}

/** A line where the step ends; the measured one is named in a row below. */
function stepEnds({ split, measured }, at, top, y) {
  const ends = [["model", split.step_s], ...(measured ? [["measured", measured.step_s]] : [])];
  return ends.flatMap(([look, seconds], row) => {
    const x = at(seconds);
    const isLeft = x > at(0) + 130;
    const place = { x: x + (isLeft ? -5 : 5), y: top + 12 + row * LINE };
    return [svg("path", { class: `end ${look}`, d: `M${x} ${place.y - 10}V${y + 2}` }),
      svg("text", { ...place, "text-anchor": isLeft ? "end" : "start", class: "row" },
        `${look} ${formatSeconds(seconds)}`)];
  });
}
