"use strict";
/* The viewer. Text of episodes reaches the page through textContent only. The address's hash holds the whole state. */

const $ = (id) => document.getElementById(id);
const PAGE = 100;
const MARKS = { passed: "✓", failed: "✗", partly: "◐", abstained: "–", dropped: "✗", unjudged: "·" };
const KINDS = [["verdict", "any verdict"], ["source", "any benchmark"], ["stop", "any stop reason"], ["tool", "any tool"],
  ["agent", "any agent"], ["model", "any model"], ["file", "any file"]];
const ORDERS = [["file", "in file order"], ["newest", "newest first"], ["slowest", "slowest first"], ["longest", "longest first"],
  ["calls", "most calls first"], ["step", "last step first"]];

const state = { rows: [], total: 0, capped: false, asked: 0, episodes: -1, shown: null };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
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

async function ask(path) {
  const response = await fetch(path);
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error || JSON.stringify(body));
  return body;
}

const number = (value) => Number(value).toLocaleString("en");
const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);
const short = (path) => path.split("/").slice(-3).join("/");

/* ---- list ---- */

function filterQuery() {
  const given = hash(), query = new URLSearchParams();
  for (const [kind] of KINDS) if (given.has(kind)) query.set(kind, given.get(kind));
  for (const key of ["text", "step", "question", "order"]) if (given.get(key)) query.set(key, given.get(key));
  return query;
}

let listed = null;

async function loadList(append = false) {
  const query = filterQuery(), key = query.toString();
  if (!append && key === listed) return mark();
  const turn = ++state.asked, offset = append ? state.rows.length : 0;
  query.set("offset", offset);
  query.set("limit", PAGE);
  try {
    const page = await ask(`api/episodes?${query}`);
    if (turn !== state.asked) return;
    listed = key;
    state.rows = append ? [...state.rows, ...page.rows] : page.rows;
    Object.assign(state, { total: page.total, capped: page.capped });
    showRows(page.rows, offset);
    $("count").textContent = page.capped ? `more than ${many(page.total, "episode")}` : many(page.total, "episode");
    $("more").hidden = state.rows.length >= page.total;
  } catch (error) {
    $("count").textContent = String(error.message);
  }
  mark();
}

/* Rows that did not change stay the nodes they are: a click begins and ends on the same one, though the list was loaded again. */
function showRows(rows, from) {
  const list = $("list");
  rows.forEach((item, index) => {
    const shown = list.children[from + index], content = JSON.stringify(item);
    if (shown?.dataset.content === content) return;
    const node = row(item);
    node.dataset.content = content;
    if (shown) shown.replaceWith(node); else list.append(node);
  });
  while (list.children.length > from + rows.length) list.lastElementChild.remove();
}

function row(item) {
  const facts = [item.source, item.step === null ? "" : `step ${item.step}`, item.score === null ? "" : `score ${item.score}`,
    many(item.calls, "call"), many(item.tokens, "token"), seconds(item.seconds), item.stop, short(item.file)];
  return make("li", {}, make("a", { href: `#e=${item.id}`, "data-id": item.id, onclick: (event) => { event.preventDefault(); open(item.id); } },
    make("span", { class: `mark ${item.verdict}`, title: item.verdict, text: MARKS[item.verdict] || "·" }),
    make("span", { class: "title", text: item.title || item.name }),
    make("span", { class: "facts", text: facts.filter(Boolean).join(" · ") })));
}

function mark() {
  const current = hash().get("e");
  for (const link of $("list").querySelectorAll("a")) {
    const here = link.dataset.id === current;
    if (here) { link.setAttribute("aria-current", "true"); link.scrollIntoView({ block: "nearest" }); } else link.removeAttribute("aria-current");
  }
}

async function loadFacets() {
  const found = await ask("api/facets"), given = hash();
  const options = (kind, all) => {
    const select = make("select", { name: kind, "aria-label": kind, class: given.has(kind) ? "set" : "", onchange: (event) => go({ [kind]: event.target.value === "\u0000" ? null : event.target.value || "", e: null }) });
    select.append(make("option", { value: "\u0000", text: all }));
    const names = found[kind].slice(0, 500);
    if (given.has(kind) && !names.some((item) => item.name === given.get(kind))) names.unshift({ name: given.get(kind), episodes: 0 });
    for (const item of names) {
      const option = make("option", { value: item.name, text: `${kind === "file" ? short(item.name) : item.name || "(none)"} (${number(item.episodes)})` });
      option.selected = given.get(kind) === item.name;
      select.append(option);
    }
    select.hidden = names.length < 2 && !given.has(kind);
    return select;
  };
  const order = make("select", { name: "order", "aria-label": "order", onchange: (event) => go({ order: event.target.value === "file" ? null : event.target.value }) });
  for (const [value, text] of ORDERS) {
    const option = make("option", { value, text });
    option.selected = (given.get("order") || "file") === value;
    order.append(option);
  }
  if (!$("selects").contains(document.activeElement)) $("selects").replaceChildren(...KINDS.map(([kind, all]) => options(kind, all)), order);
}

/* ---- one episode, or two ---- */

/* A link of a report names the episode: #find=ID&in=FILE. Its number is known once it is indexed. */
async function locate() {
  const given = hash();
  if (!given.has("find")) return;
  const query = new URLSearchParams({ name: given.get("find"), file: given.get("in") || "" });
  const found = await ask(`api/find?${query}`).catch(() => ({ number: null }));
  if (hash().get("find") !== given.get("find")) return;
  if (found.number !== null) return go({ find: null, in: null, e: found.number }, true);
  $("reader").replaceChildren(make("p", { class: "soft hint", text: `Looking for ${given.get("find")}: it is not in the index (yet).` }));
  setTimeout(locate, 1000);
}

const open = (id) => go({ e: id, with: null, tokens: null });

async function loadReader() {
  const given = hash(), id = given.get("e");
  document.body.classList.toggle("reading", id !== null);
  const key = `${id}/${given.get("with")}/${given.get("tokens")}/${given.get("others")}`;
  if (key === state.shown) return;
  state.shown = key;
  if (id === null) return $("reader").replaceChildren(make("p", { class: "soft hint", text: "Choose an episode." }));
  try {
    const ids = [id, given.get("with")].filter(Boolean);
    const episodes = await Promise.all(ids.map((one) => ask(`api/episodes/${one}`)));
    const sides = await Promise.all(episodes.map((episode, at) => side(episode, ids[at], given.has("tokens"))));
    const others = given.has("others") ? await sameQuestion(episodes[0].row) : null;
    if (state.shown !== key) return;
    $("reader").replaceChildren(bar(episodes[0], given), ...(others ? [others] : []), make("div", { class: "sides" }, ...sides));
    $("reader").scrollTop = 0;
    document.title = `${episodes[0].id} – afm view`;
  } catch (error) {
    $("reader").replaceChildren(make("p", { class: "error", text: error.message }));
  }
}

function bar(episode, given) {
  const toggle = (key, text, title) => make("button", { type: "button", id: `${key}-button`, title, "aria-pressed": String(given.has(key)), text, onclick: () => go({ [key]: given.has(key) ? null : "1" }) });
  return make("div", { class: "bar" },
    make("button", { type: "button", id: "back", text: "← List", onclick: () => go({ e: null, with: null }) }),
    make("button", { type: "button", title: "k", text: "↑ Previous", onclick: () => move(-1) }),
    make("button", { type: "button", title: "j", text: "↓ Next", onclick: () => move(1) }),
    make("span", { class: "spacer" }),
    toggle("others", "Compare", "c: other episodes of this question"),
    given.get("with") ? make("button", { type: "button", text: "Close comparison", onclick: () => go({ with: null }) }) : null,
    episode.has_tokens ? toggle("tokens", "Tokens", "t: tokens, mask and log-probabilities") : null);
}

async function sameQuestion(first) {
  const page = await ask(`api/episodes?question=${first.question}&limit=200`);
  const rest = page.rows.filter((item) => item.id !== first.id);
  const box = make("div", { class: "others", "aria-label": "other episodes of this question" });
  if (!rest.length) box.append(make("p", { class: "soft", text: "No other episode has this question." }));
  for (const item of rest) {
    box.append(make("button", { type: "button", onclick: () => go({ with: item.id, others: null }) },
      make("span", { class: `mark ${item.verdict}`, text: MARKS[item.verdict] || "·" }),
      make("span", { text: `${item.name}  ·  ${short(item.file)}  ·  ${many(item.calls, "call")}` })));
  }
  return box;
}

async function side(episode, id, withTokens) {
  const verdict = episode.verdict, cost = episode.cost, fact = episode.row;
  const facts = [fact.source, episode.model, fact.step === null ? "" : `step ${fact.step}`, `stop: ${episode.stop}`, many(cost.generations, "turn"),
    `${many(cost.tool_calls, "call")}${cost.tool_failures ? `, ${cost.tool_failures} failed` : ""}`, `${number(cost.agent_tokens)} + ${number(cost.observation_tokens)} tokens`,
    `${seconds(cost.wall_seconds)}, ${seconds(cost.tool_seconds)} in tools`];
  const parts = verdict ? Object.entries(verdict.parts).map(([name, value]) => `${name} ${value}`).join(", ") : "";
  const word = fact.verdict + (verdict && verdict.score !== null ? ` ${verdict.score}` : "");
  return make("article", { class: "side" },
    make("p", { class: "soft mono", text: `${episode.id} · ${short(fact.file)}` }),
    make("h2", { class: "question", text: episode.question }),
    make("div", { class: "line" }, make("span", { class: `badge ${fact.verdict}`, text: `${MARKS[fact.verdict] || ""} ${word}` }), make("span", { class: "soft", text: facts.filter(Boolean).join(" · ") })),
    make("p", { class: "gold" }, make("span", { class: "soft", text: "expected: " }), make("span", { text: episode.ground_truth })),
    verdict && (verdict.evidence || parts) ? make("p", { class: "soft evidence", text: [verdict.evidence, parts].filter(Boolean).join(" · ") }) : null,
    episode.reason || episode.error ? make("p", { class: "error evidence", text: [episode.reason, episode.error].filter(Boolean).join(" · ") }) : null,
    episode.prompt ? make("details", {}, make("summary", { text: "Prompt" }), make("pre", { text: episode.prompt })) : null,
    episode.provenance ? make("details", {}, make("summary", { text: "Provenance" }), make("pre", { text: episode.provenance })) : null,
    withTokens && episode.has_tokens ? await tokenBox(id) : null,
    episode.spec_found ? null : make("p", { class: "soft", text: `The agent ${episode.agent} is not known here, so roles are not told apart.` }),
    ...episode.blocks.map(block));
}

function block(item) {
  const environment = item.author === "environment";
  const name = item.role || (environment ? "environment" : "text");
  const notes = item.tool ? [item.tool, seconds(item.seconds), item.ok ? "" : "failed", item.duplicate ? "repeated" : ""].filter(Boolean).join(" · ") : environment ? "not trained on" : "";
  return make("section", { class: `block ${environment ? "environment" : ""} ${item.colour === null ? "" : `coloured h${item.colour}`}` },
    make("div", { class: "block-head" }, make("span", { text: name }), item.fault ? make("em", { text: item.fault }) : null, notes ? make("small", { text: notes }) : null),
    make("div", { class: `block-text ${item.code ? "code" : ""}`, tabindex: "0", text: item.text }));
}

async function tokenBox(id) {
  const found = await ask(`api/episodes/${id}/tokens`);
  const box = make("div", { class: "tokens", tabindex: "0" });
  for (const token of found) {
    const surprise = token.logprob === null ? 0 : token.logprob < -3 ? 3 : token.logprob < -1 ? 2 : token.logprob < -0.2 ? 1 : 0;
    const title = [token.trained === null ? "" : token.trained ? "trained" : "masked", token.logprob === null ? "" : `log-probability ${token.logprob.toFixed(3)}`, token.advantage === null ? "" : `advantage ${signed(token.advantage)}`].filter(Boolean).join(", ");
    const gain = token.advantage === null || token.advantage === 0 ? "" : token.advantage > 0 ? "up" : "down";
    box.append(make("span", { class: token.trained === false ? "masked" : [surprise ? `p${surprise}` : "", gain].filter(Boolean).join(" "), title, text: token.text }));
  }
  return make("div", {}, make("p", { class: "soft", text: `${many(found.length, "token")}; struck out: no loss; the redder, the less probable${advantageWords(found)}` }), box);
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

function advantageWords(tokens) {
  const known = tokens.map((token) => token.advantage).filter((value) => value !== null);
  if (!known.length) return "";
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return `; underlined by advantage, green above 0 and red dashed below: ${low === high ? signed(low) : `${signed(low)} to ${signed(high)}`}`;
}

function move(by) {
  const at = state.rows.findIndex((item) => String(item.id) === hash().get("e"));
  const next = state.rows[at < 0 ? 0 : at + by];
  if (next) open(next.id);
  if (at + by >= state.rows.length - 5 && state.rows.length < state.total) loadList(true);
}

/* ---- following a running job ---- */

async function follow() {
  try {
    const found = await ask("api/status");
    const left = found.bytes_total - found.bytes_done;
    $("path").textContent = found.path;
    $("path").title = found.path;
    $("status").classList.toggle("failed", Boolean(found.failure));
    $("status").textContent = found.failure || `${many(found.episodes, "episode")} in ${many(found.files, "file")}`
      + (left > 0 ? `, indexing ${Math.floor((100 * found.bytes_done) / found.bytes_total)} %` : "") + (found.bad_lines ? `, ${number(found.bad_lines)} unreadable lines` : "");
    if (found.episodes !== state.episodes) {
      state.episodes = found.episodes;
      await loadFacets();
      if ($("list").scrollTop < 40 && state.rows.length <= PAGE) { listed = null; await loadList(); }
    }
  } catch {
    $("status").textContent = "the server has ended";
    $("status").classList.add("failed");
  }
  setTimeout(follow, 1000);
}

function arrive() {
  if (document.activeElement !== $("text")) $("text").value = hash().get("text") || "";
  loadFacets().catch(() => {});
  loadList();
  loadReader();
  locate();
}

let typing;
$("text").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => go({ text: $("text").value.trim() || null, question: null }, true), 250); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => loadList(true));
$("help-button").addEventListener("click", () => $("help").showModal());
window.addEventListener("popstate", arrive);
window.addEventListener("hashchange", arrive);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("input, select, textarea, dialog");
  if (event.key === "Escape") { if (field) field.blur(); else if (hash().get("with")) go({ with: null }); else go({ e: null, others: null }); return; }
  if (field) return;
  const actions = { j: () => move(1), k: () => move(-1), "/": () => $("text").focus(), "?": () => $("help").showModal(),
    c: () => $("others-button")?.click(), t: () => $("tokens-button")?.click() };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});
arrive();
follow();
