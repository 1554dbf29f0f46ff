"use strict";
/* The table of files, the settings of a run, and its logs. */

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const utc = (date) => (Number.isNaN(Date.parse(date)) ? date : new Date(date).toISOString().slice(0, 16).replace("T", " "));
/* A team counts no tokens of its own: 0 is shown as unknown. */
const wholeTokens = (value) => (value ? number(Math.round(value)) : "–");
/* A short name, or a date, has one line on a wide screen. */
const wide = (text) => (text.length > 18 ? "wide" : "wide whole");
const FILE_ROWS = 500;
const MAX_STEPS_SHOWN = 4;

async function showFiles() {
  const files = await ask("api/files");
  const names = ["File", "Model", "Agent", "Episodes", "pass@1", "Calls", "Tokens", "Time", "Date (UTC)", ""];
  const head = make("tr", {}, ...names.map((text) => make("th", { scope: "col", text })));
  const known = files.slice(0, FILE_ROWS), evaluations = known.filter((file) => file.is_evaluation), others = known.filter((file) => !file.is_evaluation);
  const bodies = [["Evaluations", evaluations], ["Other episodes", others]].filter(([, part]) => part.length);
  const more = files.length > FILE_ROWS ? ` Only ${number(FILE_ROWS)} of ${many(files.length, "file")} are shown. The file filter of the episodes has all of them.` : "";
  const none = `No episodes in ${root.path} yet. They appear here as soon as an evaluation, a distillation or afm rl writes them. If they should be there already, stop afm view and start it with the output_dir of the run.`;
  const sorted = bodies.length > 1 ? "Newest first in each group." : "Newest first.";
  return [
    make("h2", { text: "Files" }),
    make("p", { class: "soft", text: files.length ? `${sorted} Calls, tokens and time are means per episode. Tokens are those the model wrote.${more}` : none }),
    leftOut(),
    files.length ? make("table", { class: "files" }, make("thead", {}, head), ...bodies.map(([title, part]) => filesBody(bodies.length > 1 ? title : "", part))) : null,
  ];
}

/* The files of one kind. The many files of the steps of a training run are one row until it is opened. */
function filesBody(title, files) {
  const head = title ? [make("tr", { class: "headed" }, make("th", { class: "group", colspan: "10", scope: "rowgroup", text: title }))] : [];
  const steps = new Map();
  for (const file of files) {
    const folder = file.name.match(/^(.*)step_\d+\.jsonl$/)?.[1];
    if (folder !== undefined) steps.set(folder, [...(steps.get(folder) || []), file]);
  }
  const rows = files.flatMap((file) => {
    const [folder, part] = [...steps].find(([, some]) => some.length > MAX_STEPS_SHOWN && some.includes(file)) || [];
    if (!part) return [fileRow(file)];
    const own = fileRow(file);
    own.hidden = true;
    own.dataset.folder = folder;
    return part[0] === file ? [foldRow(folder, part), own] : [own];
  });
  return make("tbody", {}, ...head, ...rows);
}

function foldRow(folder, part) {
  const sum = (value) => part.reduce((all, file) => all + value(file), 0), first = part[0];
  const mean = (value, weight = "episodes") => sum((file) => file[weight] * (file[value] ?? 0)) / sum((file) => file[weight]);
  const link = make("a", { href: "", "aria-expanded": "false", text: `${folder}step_*.jsonl, ${many(part.length, "file")}` });
  const cell = (label, text, name = null) => make("td", { "data-label": label, text, class: name });
  const row = make("tr", { class: "fold" }, make("th", { scope: "row" }, link), cell("Model", short(first.model) || "–", wide(short(first.model))), cell("Agent", first.agent || "–", wide(first.agent)),
    cell("Episodes", number(sum((file) => file.episodes))), cell("pass@1", percent(sum((file) => file.scored) ? mean("pass_at_1", "scored") : null), "score"),
    cell("Calls", mean("calls").toFixed(2)), cell("Tokens", wholeTokens(mean("tokens"))), cell("Time", seconds(mean("seconds"))),
    cell("Date", utc(part.map((file) => file.date).sort().at(-1)), wide(utc(first.date))), make("td"));
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const open = link.getAttribute("aria-expanded") === "false";
    link.setAttribute("aria-expanded", String(open));
    for (const other of row.parentNode.children) if (other.dataset.folder === folder) other.hidden = !open;
  });
  return row;
}

function fileRow(file) {
  const cell = (label, text, title = null, name = null) => make("td", { "data-label": label, title, text, class: name });
  const list = `#${new URLSearchParams({ file: file.path })}`;
  return make("tr", {},
    make("th", { scope: "row" }, make("a", { href: list, text: file.name }), file.bad ? make("small", { class: "error", text: ` ${many(file.bad, "unreadable line")}` }) : null),
    cell("Model", short(file.model) || "–", file.model, wide(short(file.model))), cell("Agent", file.agent || "–", null, wide(file.agent)), cell("Episodes", number(file.episodes)),
    make("td", { "data-label": "pass@1", class: "score", title: `${many(file.scored, "episode")} with a score`, text: percent(file.pass_at_1) }),
    cell("Calls", file.calls.toFixed(2)), cell("Tokens", wholeTokens(file.tokens)), cell("Time", seconds(file.seconds ?? 0)),
    cell("Date", utc(file.date), file.date, wide(utc(file.date))),
    make("td", {}, make("a", { href: `#about=${file.id}`, text: "settings" })));
}

/* List what a bundle lacks. */
function leftOut() {
  const missing = window.AFM_BUNDLE?.leftOut() || [];
  if (!missing.length) return null;
  return make("details", { class: "notice" }, make("summary", { text: "This is a part of the run. See what is left out." }),
    make("ul", {}, ...missing.map((text) => make("li", { text }))));
}

function pairs(rows, className) {
  return make("dl", { class: className }, ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value, class: value === "not recorded" ? "soft" : null })]));
}

async function showAbout(id) {
  const about = await ask(`api/files/${id}`);
  const none = "There is no manifest or settings file next to these episodes.";
  return [
    make("p", { class: "soft" }, make("a", { href: "#view=files", text: "← Files" })),
    make("h2", { class: "mono-name", text: about.name }),
    make("p", {}, make("a", { href: `#${new URLSearchParams({ file: about.path })}`, text: "Show the episodes" })),
    about.facts.length ? pairs(about.facts.map(([name, value]) => [name, name === "date" && !Number.isNaN(Date.parse(value)) ? `${utc(value)} UTC` : value]), "facts") : make("p", { class: "soft", text: none }),
    ...about.parts.map((part) => make("details", {}, make("summary", { text: `${part.name}, ${many(part.rows.length, "key")}` }), pairs(part.rows, "facts keys"))),
  ];
}

/* Show the settings of the open episode's file, or of the file in the filter. */
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
  if (!logs.length) return [make("h2", { text: "Log" }), make("p", { class: "soft", text: "The run has no log file (*.log). Training runs and servers write one. Evaluations do not." })];
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
