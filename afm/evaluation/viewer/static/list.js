"use strict";
/* The list of episodes: filters, search, order, rows. */

const PAGE = 100;
const KINDS = [["verdict", "any verdict"], ["source", "any benchmark"], ["stop", "any stop reason"], ["tool", "any tool"],
  ["agent", "any agent"], ["model", "any model"], ["file", "any file"]];
const ORDERS = [["file", "in file order"], ["newest", "newest first"], ["slowest", "slowest first"], ["longest", "longest first"],
  ["calls", "most calls first"], ["step", "last step first"]];
const list = { rows: [], total: 0, asked: 0, key: null };

function filterQuery() {
  const state = hash(), query = new URLSearchParams();
  for (const [kind] of KINDS) if (state.has(kind)) query.set(kind, state.get(kind));
  for (const key of ["text", "step", "question", "order"]) if (state.get(key)) query.set(key, state.get(key));
  return query;
}

async function loadList(append = false) {
  const query = filterQuery(), key = query.toString();
  if (!append && key === list.key) return markRow();
  const turn = ++list.asked, offset = append ? list.rows.length : 0;
  query.set("offset", offset);
  query.set("limit", PAGE);
  try {
    const page = await ask(`api/episodes?${query}`);
    if (turn !== list.asked) return;
    Object.assign(list, { key, rows: append ? [...list.rows, ...page.rows] : page.rows, total: page.total });
    showRows(page.rows, offset);
    $("count").textContent = page.capped ? `more than ${many(page.total, "episode")}` : many(page.total, "episode");
    $("more").hidden = list.rows.length >= page.total;
    showEmpty(query);
  } catch (error) {
    $("count").textContent = String(error.message);
  }
  markRow();
}

/* Say why there are no rows, with a link back to all episodes. */
function showEmpty(query) {
  $("empty").hidden = list.rows.length > 0;
  $("list").hidden = $("list-head").hidden = !list.rows.length;
  if (list.rows.length) return;
  const filtered = [...query.keys()].some((key) => !["offset", "limit", "order"].includes(key));
  const words = filtered ? "No episode matches the search and the filters. " : "No episodes yet. The page shows them as the run writes them.";
  $("empty").replaceChildren(words, ...(filtered ? [make("a", { href: "#view=episodes", text: "Show all episodes" })] : []));
}

/* Keep the nodes of rows that did not change, so that a click survives a reload of the list. */
function showRows(rows, from) {
  const nodes = $("list");
  rows.forEach((item, index) => {
    const shown = nodes.children[from + index], content = JSON.stringify(item);
    if (shown?.dataset.content === content) return;
    const node = row(item);
    node.dataset.content = content;
    if (shown) shown.replaceWith(node); else nodes.append(node);
  });
  while (nodes.children.length > from + rows.length) nodes.lastElementChild.remove();
  nodes.hidden = false;
  alignHead();
}

/* The head of the table leaves as much room for a scroll bar as the rows do. */
function alignHead() {
  $("list-head").style.paddingRight = `${14 + $("list").offsetWidth - $("list").clientWidth}px`;
}

function row(item) {
  const step = item.step === null ? "" : `step ${item.step} · `;
  const word = item.verdict + (item.score === null ? "" : `, score ${item.score}`);
  return make("li", {}, make("a", { href: `#e=${item.id}`, "data-id": item.id, onclick: (event) => { event.preventDefault(); open(item.id); } },
    mark(item.verdict, word),
    make("span", { class: "title", text: item.title || item.name }),
    make("span", { class: "answer", title: "answer", text: item.answer || "no answer" }),
    make("span", { class: "expected", title: "expected", text: item.expected }),
    make("span", { class: "figure calls", title: item.failures ? `${item.failures} failed` : null, text: number(item.calls) }, make("span", { class: "unit", text: item.calls === 1 ? " call" : " calls" })),
    make("span", { class: "figure", text: wholeTokens(item.tokens) }),
    make("span", { class: "figure", text: seconds(item.seconds) }),
    make("span", { class: "where", title: `${item.source} · ${item.stop} · ${item.file}`, text: `${step}${short(item.file)}` })));
}

function markRow() {
  const current = hash().get("e");
  for (const link of $("list").querySelectorAll("a")) {
    const here = link.dataset.id === current;
    if (here) { link.setAttribute("aria-current", "true"); link.scrollIntoView({ block: "nearest" }); } else link.removeAttribute("aria-current");
  }
}

function selectOf(kind, all, names) {
  const state = hash(), chosen = state.get(kind);
  const change = (event) => go({ [kind]: event.target.value === "\u0000" ? null : event.target.value || "", e: null, view: "episodes" });
  const select = make("select", { name: kind, "aria-label": kind, class: state.has(kind) ? "set" : "", onchange: change });
  select.append(make("option", { value: "\u0000", text: all }));
  if (state.has(kind) && !names.some((item) => item.name === chosen)) names.unshift({ name: chosen, episodes: 0 });
  for (const item of names) {
    const option = make("option", { value: item.name, text: `${kind === "file" ? short(item.name) : item.name || "(none)"} (${number(item.episodes)})` });
    option.selected = chosen === item.name;
    select.append(option);
  }
  select.hidden = names.length < 2 && !state.has(kind);
  return select;
}

async function loadFacets() {
  const facets = await ask("api/facets"), state = hash();
  const order = make("select", { name: "order", "aria-label": "order", onchange: (event) => go({ order: event.target.value === "file" ? null : event.target.value, view: "episodes" }) });
  for (const [value, text] of ORDERS) {
    const option = make("option", { value, text });
    option.selected = (state.get("order") || "file") === value;
    order.append(option);
  }
  const selects = KINDS.map(([kind, all]) => selectOf(kind, all, facets[kind].slice(0, 500)));
  if (!$("selects").contains(document.activeElement)) $("selects").replaceChildren(...selects, order);
}

const open = (id) => go({ e: id, with: null, tokens: null, diff: null });

function move(by) {
  const at = list.rows.findIndex((item) => String(item.id) === hash().get("e"));
  const next = list.rows[at < 0 ? 0 : at + by];
  if (next) open(next.id);
  if (at + by >= list.rows.length - 5 && list.rows.length < list.total) loadList(true);
}
