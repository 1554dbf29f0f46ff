"use strict";
/* Choose the screen from the address, handle keys, and follow a running job. */

const EPISODE_KEYS = [...KINDS.map(([kind]) => kind), "text", "step", "question", "order", "e", "find"];
const screenState = { key: null, episodes: -1, isFile: null };

/* Files, settings and the log fill the page. Everything else is the list with its reader. */
function viewOf(state) {
  if (state.has("about")) return "about";
  if (state.get("view")) return state.get("view");
  if (EPISODE_KEYS.some((key) => state.has(key)) || screenState.isFile) return "episodes";
  return "files";
}

async function showPage(view, state) {
  const key = `${view}/${state.get("about")}/${state.get("log")}/${view === "files" ? screenState.episodes : ""}`;
  if (key === screenState.key) return;
  screenState.key = key;
  const waiting = setTimeout(() => { if (key === screenState.key) $("page").replaceChildren(make("p", { class: "soft hint", text: "Loading." })); }, 400);
  try {
    const parts = await (view === "about" ? showAbout(state.get("about")) : view === "log" ? showLog(state.get("log")) : showFiles());
    clearTimeout(waiting);
    if (key !== screenState.key) return;
    const focused = $("page").contains(document.activeElement) ? document.activeElement.href : null;
    $("page").replaceChildren(...parts.filter((part) => part !== null));
    if (focused) [...$("page").querySelectorAll("a")].find((link) => link.href === focused)?.focus();
  } catch (error) {
    clearTimeout(waiting);
    $("page").replaceChildren(make("p", { class: "error", text: error.message }));
  }
}

function arrive() {
  const state = hash(), view = viewOf(state), isList = view === "episodes";
  for (const link of document.querySelectorAll("nav a")) if (link.dataset.view === (view === "about" ? "files" : view)) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  $("page").hidden = isList;
  $("panes").hidden = !isList;
  document.body.classList.toggle("reading", isList && (state.has("e") || state.has("find")));
  if (!isList) { showPage(view, state); return; }
  screenState.key = null;
  if (document.activeElement !== $("text")) $("text").value = state.get("text") || "";
  loadFacets().catch(() => {});
  loadList();
  loadReader();
  locate();
}

async function follow() {
  try {
    const status = await ask("api/status");
    const left = status.bytes_total - status.bytes_done;
    root.path = status.is_file ? status.path.replace(/\/[^/]*$/, "") : status.path;
    $("path").textContent = status.path;
    $("path").title = status.path;
    $("status").classList.toggle("failed", Boolean(status.failure));
    $("status").textContent = status.failure || `${status.of > status.episodes ? `${number(status.episodes)} of ` : ""}${many(status.of ?? status.episodes, "row")} in ${many(status.files, "file")}`
      + (left > 0 ? `, indexing ${Math.floor((100 * status.bytes_done) / status.bytes_total)} %` : "") + (status.bad_lines ? `, ${many(status.bad_lines, "unreadable line")}` : "");
    const first = screenState.isFile === null;
    screenState.isFile = status.is_file;
    if (first) arrive();
    if (status.episodes !== screenState.episodes) {
      screenState.episodes = status.episodes;
      if (!first && $("panes").hidden) arrive();
      else if (!first) await loadFacets();
      if (!$("panes").hidden && $("list").scrollTop < 40 && list.rows.length <= PAGE) { list.key = null; await loadList(); }
    }
    await followLog();
  } catch {
    $("status").textContent = "The server has stopped. Start afm view again.";
    $("status").classList.add("failed");
  }
  if (!window.AFM_BUNDLE) setTimeout(follow, 1000);
}

function leave() {
  const state = hash();
  if (state.get("with")) go({ with: null, diff: null });
  else if (state.has("e")) go({ e: null, others: null, view: "episodes" });
  else visit({ view: "files" });
}

/* Focus the next or previous row of the table of files. */
function moveInTable(by) {
  const links = [...$("page").querySelectorAll("tbody tr:not([hidden]) th a")];
  links[links.indexOf(document.activeElement) + by]?.focus();
}

let typing;
$("text").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => go({ text: $("text").value.trim() || null, question: null, view: "episodes" }, true), 250); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => loadList(true));
$("help-button").addEventListener("click", () => $("help").showModal());
window.addEventListener("resize", alignHead);
window.addEventListener("popstate", arrive);
window.addEventListener("hashchange", arrive);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("input, select, textarea, dialog[open]");
  if (event.key === "Escape") { if (field) field.blur(); else leave(); return; }
  if (field) return;
  const step = (by) => ($("panes").hidden ? moveInTable(by) : move(by));
  const actions = { j: () => step(1), k: () => step(-1), "?": () => $("help").showModal(),
    "/": () => { if ($("panes").hidden) visit({ view: "episodes" }); $("text").focus(); },
    f: () => visit({ view: "files" }), e: () => visit({ view: "episodes" }), l: () => visit({ view: "log" }), i: aboutCurrent,
    c: () => $("others-button")?.click(), d: () => $("diff-button")?.click(), t: () => $("tokens-button")?.click() };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});
follow();
