// A training step of a split model: the arithmetic of labkit/placement/planner.py, in the browser.
//
// A profile is {batch_size, layers: [{name, forward_s, backward_s, output_bytes, parameter_bytes,
// held_bytes}]}, a link {alpha_s, beta_s_per_byte}. tests/widgets compares every number with
// predict_split. Symbols: L layers, P stages, M micro-batches.

// What training holds for a parameter: value, gradient, momentum.
const TRAINED_VALUES = 3;

// By stage: [kind, micro-batch] in the order in which the stage runs them.
const PIPELINES = {
  gpipe: (stage, numStages, microBatches) =>
    ["forward", "backward"].flatMap((kind) => numbers(microBatches).map((i) => [kind, i])),
  "1f1b": (stage, numStages, microBatches) => {
    const ahead = Math.min(numStages - 1 - stage, microBatches);
    const stream = numbers(ahead).map((i) => ["forward", i]);
    for (const i of numbers(microBatches)) {
      if (i + ahead < microBatches) stream.push(["forward", i + ahead]);
      stream.push(["backward", i]);
    }
    return stream;
  },
};

/** The profile at another batch size: its times and bytes are in proportion. */
export function scaled(profile, batchSize) {
  const ratio = batchSize / profile.batch_size;
  const layers = profile.layers.map((layer) => ({
    ...layer,
    forward_s: layer.forward_s * ratio,
    backward_s: layer.backward_s * ratio,
    output_bytes: rounded(layer.output_bytes * ratio),
    held_bytes: rounded(layer.held_bytes * ratio),
  }));
  return { ...profile, batch_size: batchSize, layers };
}

/** The predicted step of a split: what predict_split returns, and its slots and transfers. */
export function predictSplit(profile, points, link, microBatches = 1, schedule = "gpipe",
  frozen = 0) {
  const M = Math.min(microBatches, profile.batch_size);
  const layers = trainedLayers(profile, frozen);
  const first = layers.filter((layer) => layer.isBeforeTraining).length;
  const bounds = stageBounds(points, layers.length);
  const firstTrained = bounds.filter(([, end]) => end <= first).length;
  const sumOf = (name, [start, end]) => total(layers.slice(start, end).map((l) => l[name]));
  const split = {
    split_points: points,
    schedule,
    micro_batches: M,
    forward_s: bounds.map((bound) => sumOf("forward_s", bound)),
    backward_s: bounds.map((bound) => sumOf("backward_s", bound)),
    hop_bytes: points.map((cut) => layers[cut - 1].output_bytes),
    memory_bytes: bounds.map((bound, stage) => {
      const held = sumOf("held_bytes", bound) * inFlight(schedule, stage, bounds.length, M);
      return sumOf("state_bytes", bound) + Math.ceil(held / M);
    }),
    first_trained: firstTrained,
  };
  const messageS = split.hop_bytes.map((bytes) => link.alpha_s + link.beta_s_per_byte * (bytes / M));
  split.hop_s = messageS.map((seconds) => M * seconds);
  split.slots = slotsOf(split, messageS);
  split.transfers = transfersOf(split.slots, messageS, firstTrained);
  split.step_s = Math.max(...split.slots.map((slot) => slot.end_s));
  const busyS = total(split.forward_s) + total(split.backward_s);
  split.bubble = split.step_s ? 1 - busyS / (bounds.length * split.step_s) : 0;
  return split;
}

/** [start, end) of each stage. */
export function stageBounds(points, numLayers) {
  return [...points, numLayers].map((end, stage) => [stage ? points[stage - 1] : 0, end]);
}

/** Points with one cut moved; the others move as far as needed to leave each stage a layer. */
export function pushed(points, cut, wanted, numLayers) {
  const last = points.length - 1;
  const moved = [...points];
  moved[cut] = Math.min(Math.max(wanted, cut + 1), numLayers - 1 - (last - cut));
  for (let i = cut + 1; i <= last; i++) moved[i] = Math.max(moved[i], moved[i - 1] + 1);
  for (let i = cut - 1; i >= 0; i--) moved[i] = Math.min(moved[i], moved[i + 1] - 1);
  return moved;
}

/** Points for another number of cuts: the present ones, moved if necessary, then new ones. */
export function resized(points, count, numLayers) {
  const made = points.slice(0, count);
  for (let i = made.length - 1; i >= 0; i--) made[i] = Math.min(made[i], numLayers - count + i);
  while (made.length < count) made.push(Math.floor(((made.at(-1) ?? 0) + numLayers) / 2));
  return made;
}

/** What layers cost if the first `frozen` ones are not trained. */
function trainedLayers(profile, frozen) {
  let isBeforeTraining = true;
  return profile.layers.map((layer, i) => {
    const isTrained = i >= frozen && layer.parameter_bytes > 0;
    isBeforeTraining &&= !isTrained;
    return {
      ...layer,
      isBeforeTraining,
      backward_s: isBeforeTraining ? 0 : layer.backward_s,
      held_bytes: isBeforeTraining ? 0 : layer.held_bytes,
      state_bytes: layer.parameter_bytes * (isTrained ? TRAINED_VALUES : 1),
    };
  });
}

/** The largest number of micro-batches whose activations a stage holds at the same time. */
function inFlight(schedule, stage, numStages, microBatches) {
  let held = 0;
  let most = 0;
  for (const [kind] of PIPELINES[schedule](stage, numStages, microBatches)) {
    held += kind === "forward" ? 1 : -1;
    most = Math.max(most, held);
  }
  return most;
}

/** Run every action as early as possible: in its stage's order, once its inputs have arrived. */
function slotsOf(split, messageS) {
  const P = split.forward_s.length;
  const M = split.micro_batches;
  const streams = numbers(P).map((stage) =>
    PIPELINES[split.schedule](stage, P, M).filter(
      ([kind]) => kind === "forward" || stage >= split.first_trained));
  const slots = streams.map(() => []);
  const freeS = streams.map(() => 0);
  const ended = streams.map(() => ({ forward: [], backward: [] }));
  const readyS = (stage, kind, i) => {
    const before = kind === "forward" ? stage - 1 : stage + 1;
    if (before < 0 || before >= P) return 0;
    return ended[before][kind][i] + messageS[Math.min(before, stage)]; // NaN: not there yet
  };
  let left = total(streams.map((stream) => stream.length));
  while (left) {
    for (const [stage, stream] of streams.entries()) {
      while (slots[stage].length < stream.length) {
        const [kind, micro_batch] = stream[slots[stage].length];
        const ready_s = readyS(stage, kind, micro_batch);
        if (Number.isNaN(ready_s)) break;
        const start_s = Math.max(ready_s, freeS[stage]);
        const end_s = start_s + split[`${kind}_s`][stage] / M;
        freeS[stage] = ended[stage][kind][micro_batch] = end_s;
        slots[stage].push({ stage, kind, micro_batch, start_s, end_s });
        left -= 1;
      }
    }
  }
  return slots.flat();
}

/** Every message of the step: over which cut, in which direction, from when to when. */
function transfersOf(slots, messageS, firstTrained) {
  return slots.flatMap(({ stage, kind, micro_batch, end_s }) => {
    const cut = kind === "forward" ? stage : stage - 1;
    const isSent = kind === "forward" ? cut < messageS.length : stage > firstTrained;
    const sent = { cut, kind: kind === "forward" ? "activation" : "gradient", micro_batch };
    return isSent ? [{ ...sent, start_s: end_s, end_s: end_s + messageS[cut] }] : [];
  });
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

function numbers(count) {
  return [...Array(count).keys()];
}

/** As Python rounds: a half to the even neighbour. */
function rounded(value) {
  const below = Math.floor(value);
  if (value - below !== 0.5) return Math.round(value);
  return below % 2 ? below + 1 : below;
}
