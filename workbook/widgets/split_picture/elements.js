// Making elements: `svg("rect", {x: 1})`, `html("p", {class: "said"}, "text")`.

/** An SVG element with attributes, and children or text. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

/** An HTML element with attributes, and children or text. */
export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Set attributes of an element; null removes one. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }
}

/** A name that no other view uses. */
export function uniqueName() {
  return `labkit-${Math.random().toString(36).slice(2)}`;
}

function filled(element, attributes, children) {
  set(element, attributes);
  element.append(...children);
  return element;
}
