"use strict";
/* The table of files, what a run was made with, and its logs. */

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const day = (date) => date.slice(0, 16).replace("T", " ");
const FILE_ROWS = 500;

async function showFiles() {
  const files = await ask("api/files");
  const names = ["File", "Model", "Agent", "Episodes", "pass@1", "Calls", "Tokens", "Time", "Date", ""];
  const head = make("tr", {}, ...names.map((text) => make("th", { scope: "col", text })));
  const body = files.slice(0, FILE_ROWS).map(fileRow);
  const more = files.length > FILE_ROWS ? `The newest ${number(FILE_ROWS)} of ${many(files.length, "file")}; the episodes' filter has them all.` : "";
  return [
    make("h2", { text: "Files" }),
    make("p", { class: "soft", text: `Newest first. Calls, tokens and time are means of an episode. ${more}` }),
    leftOut(),
    make("table", { class: "files" }, make("thead", {}, head), make("tbody", {}, ...body)),
  ];
}

function fileRow(file) {
  const cell = (label, text, title = null) => make("td", { "data-label": label, title, text });
  const list = `#${new URLSearchParams({ file: file.path })}`;
  return make("tr", {},
    make("th", { scope: "row" }, make("a", { href: list, text: file.name }), file.bad ? make("small", { class: "error", text: ` ${many(file.bad, "unreadable line")}` }) : null),
    cell("Model", short(file.model)), cell("Agent", file.agent), cell("Episodes", number(file.episodes)),
    make("td", { "data-label": "pass@1", class: "score", title: `${many(file.scored, "episode")} with a score`, text: percent(file.pass_at_1) }),
    cell("Calls", file.calls.toFixed(2)), cell("Tokens", number(Math.round(file.tokens))), cell("Time", seconds(file.seconds ?? 0)),
    cell("Date", day(file.date), file.date),
    make("td", {}, make("a", { href: `#about=${file.id}`, text: "settings" })));
}

/* A bundle says what it lacks. */
function leftOut() {
  const missing = window.AFM_BUNDLE?.leftOut() || [];
  if (!missing.length) return null;
  return make("details", { class: "notice" }, make("summary", { text: "A part of the run: what was left out" }),
    make("ul", {}, ...missing.map((text) => make("li", { text }))));
}

function pairs(rows, className) {
  return make("dl", { class: className }, ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
}

async function showAbout(id) {
  const about = await ask(`api/files/${id}`);
  const none = "No manifest or settings file lies beside these episodes, so nothing is known of how they were made.";
  return [
    make("p", { class: "soft" }, make("a", { href: "#view=files", text: "Files" })),
    make("h2", { class: "mono-name", text: about.name }),
    make("p", {}, make("a", { href: `#${new URLSearchParams({ file: about.path })}`, text: "Its episodes" })),
    about.facts.length ? pairs(about.facts, "facts") : make("p", { class: "soft", text: none }),
    ...about.parts.map((part) => make("details", {}, make("summary", { text: `${part.name}, ${many(part.rows.length, "key")}` }), pairs(part.rows, "facts keys"))),
  ];
}

/* The settings of the run that is being looked at: of the open episode's file, or of the file that is filtered by. */
async function aboutCurrent() {
  const state = hash(), shown = reader.episodes[0]?.row.file;
  const path = (state.get("e") && shown) || state.get("file");
  const files = await ask("api/files");
  const file = files.find((item) => item.path === path) || files[0];
  if (file) visit({ about: file.id });
}

/* ---- logs ---- */

const log = { name: null, begin: 0, end: 0 };

async function showLog(chosen) {
  const logs = await ask("api/logs");
  if (!logs.length) return [make("h2", { text: "Log" }), make("p", { class: "soft", text: "The run has no log file (*.log). Training and servers write one, evaluations do not." })];
  const name = logs.some((item) => item.name === chosen) ? chosen : logs[0].name;
  const piece = await ask(`api/logs/read?${new URLSearchParams({ name })}`);
  Object.assign(log, { name, begin: piece.begin, end: piece.end });
  const select = make("select", { "aria-label": "log", onchange: (event) => go({ log: event.target.value }) });
  for (const item of logs) {
    const option = make("option", { value: item.name, text: `${item.name} (${size(item.size)})` });
    option.selected = item.name === name;
    select.append(option);
  }
  const earlier = make("button", { id: "earlier", type: "button", text: "Earlier lines", onclick: readEarlier });
  earlier.hidden = piece.begin === 0 || Boolean(window.AFM_BUNDLE);
  const lines = make("pre", { id: "log-text", tabindex: "0", text: piece.text });
  requestAnimationFrame(() => { lines.scrollTop = lines.scrollHeight; });
  return [make("div", { class: "bar" }, make("h2", { text: "Log" }), select, earlier), lines];
}

async function readEarlier() {
  const piece = await ask(`api/logs/read?${new URLSearchParams({ name: log.name, end: log.begin })}`);
  const lines = $("log-text"), before = lines.scrollHeight - lines.scrollTop;
  lines.prepend(piece.text);
  lines.scrollTop = lines.scrollHeight - before;
  log.begin = piece.begin;
  $("earlier").hidden = piece.begin === 0;
}

async function followLog() {
  const lines = $("log-text");
  if (!lines || window.AFM_BUNDLE) return;
  const name = log.name, piece = await ask(`api/logs/read?${new URLSearchParams({ name, begin: log.end })}`);
  if (name !== log.name || piece.begin !== log.end || !piece.text) return;
  const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
  lines.append(piece.text);
  log.end = piece.end;
  if (atEnd) lines.scrollTop = lines.scrollHeight;
}
