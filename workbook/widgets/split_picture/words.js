// Numbers as text: the units of labkit/units.py.

/** `12.3 ms`; two minutes and more read `2 min 5 s`. */
export function formatSeconds(seconds) {
  const whole = Math.round(seconds);
  if (whole >= 7200) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  if (whole >= 120) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const [scale, unit] = secondUnit(seconds);
  return `${formatNumber(seconds / scale)} ${unit}`;
}

/** `1.5 KiB`. */
export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  // A number that would be printed as 1,024 is shown in the next unit.
  while (bytes / 1024 ** place >= 1023.5 && place < units.length - 1) place += 1;
  return `${formatNumber(bytes / 1024 ** place)} ${units[place]}`;
}

/** Three significant digits; no fraction for 100 and more. */
export function formatNumber(value) {
  if (Math.abs(value) < 99.95) return String(Number(value.toPrecision(3)));
  return Math.round(value).toLocaleString("en-US");
}

/** The unit in which to show these seconds: [its length in seconds, its name]. */
export function secondUnit(seconds) {
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  if (seconds === 0) return units[0];
  return units.find(([scale]) => seconds >= 0.9995 * scale) ?? units.at(-1);
}

/** `1 layer`, `2 layers`. */
export function formatCount(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** `cut before layers 10, 17`. */
export function cutsWords(points) {
  return `cut before layer${points.length > 1 ? "s" : ""} ${points.join(", ")}`;
}
