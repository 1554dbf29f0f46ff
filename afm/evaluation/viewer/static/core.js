"use strict";
/* Shared by all parts of the viewer: nodes, the address, requests to the server, and formats of figures.
   Text of episodes reaches the page only through textContent. The hash of the address holds the whole state. */

const $ = (id) => document.getElementById(id);
const MARKS = { passed: "✓", failed: "✗", partly: "◐", abstained: "–", dropped: "⊘", unjudged: "○" };
const COLOURS = 12;
const DOT = "\u00a0· ";   // between facts; no line begins with it
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f]|[\u202a-\u202e\u2066-\u2069]/g;

/* Show control characters as \x1b and \u202e. Otherwise they would be boxes or change the reading order. */
const visible = (text) => String(text).replace(HIDDEN, (sign) => {
  const code = sign.charCodeAt(0).toString(16);
  return code.length > 2 ? `\\u${code}` : `\\x${code.padStart(2, "0")}`;
});

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = visible(value ?? "");
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const hash = () => new URLSearchParams(location.hash.slice(1));

function go(changes, replace = false) {
  const next = hash();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === "") next.delete(key); else next.set(key, value);
  }
  const address = `#${next}`;
  if (address === location.hash) return;
  if (replace) history.replaceState(null, "", address); else history.pushState(null, "", address);
  arrive();
}

/* Go to a new address and drop the old state. */
function visit(state) {
  history.pushState(null, "", `#${new URLSearchParams(state)}`);
  arrive();
}

async function ask(path) {
  if (window.AFM_BUNDLE) return AFM_BUNDLE.answer(path);
  const response = await fetch(path);
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error || JSON.stringify(body));
  return body;
}

const number = (value) => Number(value).toLocaleString("en", value >= 1e7 ? { notation: "compact", maximumFractionDigits: 1 } : {});
const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const DURATIONS = [[172800, 86400, "d", 0], [7200, 3600, "h", 1], [600, 60, "min", 0], [1, 1, "s", 1], [0, 0.001, "ms", 0]];
const seconds = (value) => {
  const [, unit, name, digits] = DURATIONS.find(([from]) => value >= from) || DURATIONS.at(-1);
  const figure = value / unit;
  return `${figure < 1e4 ? figure.toFixed(digits) : number(Math.round(figure))} ${name}`;
};
const mark = (verdict, word) => make("span", { class: `mark ${verdict}`, title: word, role: "img", "aria-label": word, text: MARKS[verdict] || "○" });
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
/* A path below the shown folder; only the last parts of any other path. */
const root = { path: "" };
const short = (path) => (root.path && path.startsWith(`${root.path}/`) ? path.slice(root.path.length + 1) : path.split("/").slice(-3).join("/"));
const size = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1 << 20 ? `${(bytes / 1024).toFixed(0)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`);
