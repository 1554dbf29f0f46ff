"use strict";
/* One episode, or two side by side, and the tokens of an episode. */

const reader = { key: null, episodes: [] };

/* Links of reports name an episode: #find=ID&in=FILE. The episode has a number once it is indexed. */
async function locate() {
  const state = hash();
  if (!state.has("find")) return;
  const query = new URLSearchParams({ name: state.get("find"), file: state.get("in") || "" });
  const match = await ask(`api/find?${query}`).catch(() => ({ number: null }));
  if (hash().get("find") !== state.get("find")) return;
  if (match.number !== null) return go({ find: null, in: null, e: match.number }, true);
  $("reader").replaceChildren(make("p", { class: "soft hint", text: `Waiting for episode ${state.get("find")}. It is not in the index yet.` }));
  setTimeout(locate, 1000);
}

async function loadReader() {
  const state = hash(), id = state.get("e");
  const key = ["e", "with", "tokens", "others", "diff"].map((name) => state.get(name)).join("/");
  if (key === reader.key) return;
  reader.key = key;
  if (id === null) { reader.episodes = []; return $("reader").replaceChildren(make("p", { class: "soft hint", text: "Choose an episode." })); }
  const waiting = setTimeout(() => { if (reader.key === key) $("reader").prepend(make("p", { class: "soft", role: "status", text: "Loading." })); }, 400);
  try {
    const ids = [id, state.get("with")].filter(Boolean);
    const episodes = await Promise.all(ids.map((item) => ask(`api/episodes/${item}`)));
    const compared = state.has("diff") && episodes.length > 1;
    const sides = await Promise.all(episodes.map((episode, at) => side(episode, ids[at], state.has("tokens"), !compared)));
    const others = state.has("others") ? await sameQuestion(episodes[0].row) : null;
    if (reader.key !== key) return;
    reader.episodes = episodes;
    $("reader").replaceChildren(bar(episodes, state), ...(others ? [others] : []), make("div", { class: "sides" }, ...sides), ...(compared ? differences(...episodes) : []));
    $("reader").scrollTop = 0;
    document.title = `${episodes[0].id} – afm view`;
  } catch (error) {
    if (reader.key !== key) return;
    $("reader").replaceChildren(make("p", { class: "error", text: error.message }));
  } finally {
    clearTimeout(waiting);
  }
}

function bar(episodes, state) {
  const toggle = (name, text, title) => make("button", { id: `${name}-button`, type: "button", title, text, "aria-pressed": String(state.has(name)), onclick: () => go({ [name]: state.has(name) ? null : 1 }) });
  const button = (text, title, onclick, id = null) => make("button", { id, type: "button", title, text, onclick });
  const step = (arrow, word, key, by) => make("button", { type: "button", title: `${word} (${key})`, onclick: () => move(by) }, arrow, make("span", { class: "word", text: ` ${word}` }));
  return make("div", { class: "bar" },
    button("← List", "Esc", leave, "back"),
    step("↑", "Previous", "k", -1),
    step("↓", "Next", "j", 1),
    make("span", { class: "spacer" }),
    toggle("others", "Compare", "c: other episodes of this question"),
    state.get("with") ? toggle("diff", "Differences", "d: step by step, with the words that differ") : null,
    state.get("with") ? button("Close comparison", "Esc", () => go({ with: null, diff: null })) : null,
    episodes[0].has_tokens ? toggle("tokens", "Tokens", "t: tokens, mask and log-probabilities") : null,
    button("Settings", "i: settings of the run", aboutCurrent));
}

async function sameQuestion(first) {
  const page = await ask(`api/episodes?question=${first.question}&limit=200`);
  const rest = page.rows.filter((item) => item.id !== first.id);
  const box = make("div", { class: "others", "aria-label": "other episodes of this question" });
  box.append(make("p", { class: "soft", text: rest.length ? "Other episodes of this question" : "No other episode has this question." }));
  for (const item of rest) {
    const facts = [item.name, item.answer, short(item.file), many(item.calls, "call")];
    box.append(make("button", { type: "button", onclick: () => go({ with: item.id, others: null }) },
      mark(item.verdict, item.verdict),
      make("span", { text: facts.filter(Boolean).join(DOT) })));
  }
  return box;
}

async function side(episode, id, withTokens, withBlocks) {
  const verdict = episode.verdict, cost = episode.cost, fact = episode.row;
  const facts = [fact.source, episode.model, fact.step === null ? "" : `step ${fact.step}`, `stop: ${episode.stop}`, cost.generations ? many(cost.generations, "turn") : "",
    `${many(cost.tool_calls, "call")}${cost.tool_failures ? `, ${number(cost.tool_failures)} failed` : ""}`, cost.agent_tokens && `${many(cost.agent_tokens, "token")} written${cost.observation_tokens ? `, ${number(cost.observation_tokens)} observed` : ""}`,
    cost.wall_seconds && `${seconds(cost.wall_seconds)}${cost.tool_seconds ? `, ${seconds(cost.tool_seconds)} in tools` : ""}`];
  const parts = verdict ? Object.entries(verdict.parts).map(([name, value]) => `${name} ${value}`).join(", ") : "";
  const word = fact.verdict + (verdict && verdict.score !== null ? `, score ${verdict.score}` : "");
  return make("article", { class: "side" },
    make("p", { class: "soft mono", text: `${episode.id}${DOT}${short(fact.file)}` }),
    make("h2", { class: "question", text: episode.question }),
    make("div", { class: "line" }, make("span", { class: `badge ${fact.verdict}`, text: `${MARKS[fact.verdict] || ""} ${word}` }), make("span", { class: "soft", text: facts.filter(Boolean).join(DOT) })),
    make("dl", { class: "gold" }, ...[["answer", fact.answer || "none"], ["expected", episode.expected || episode.ground_truth || "none"]].map(([term, text]) => make("div", {}, make("dt", { text: term }), make("dd", { text })))),
    verdict && (verdict.evidence || parts) ? make("p", { class: "soft evidence", text: [verdict.evidence, parts].filter(Boolean).join(DOT) }) : null,
    episode.reason || episode.error ? make("p", { class: "error evidence", text: [episode.reason, episode.error].filter(Boolean).join(DOT) }) : null,
    episode.expected && episode.expected !== episode.ground_truth ? make("details", {}, make("summary", { text: "Ground truth" }), make("pre", { text: episode.ground_truth })) : null,
    episode.prompt ? make("details", {}, make("summary", { text: "Prompt" }), make("pre", { text: episode.prompt })) : null,
    episode.provenance ? make("details", {}, make("summary", { text: "Provenance" }), make("pre", { text: episode.provenance })) : null,
    episode.messages.length ? make("details", { class: "messages", open: episode.blocks.length < 2 }, make("summary", { text: `Messages behind the answer, ${number(episode.messages.filter((item) => item.speaker).length)}` }), ...messageBlocks(episode.messages)) : null,
    withTokens && episode.has_tokens ? await tokenBox(id) : null,
    episode.spec_found ? null : make("p", { class: "soft", text: `The roles are not separated, because the agent ${episode.agent} is not declared here. Copy its YAML next to the file, as ${episode.agent}.yaml, and start afm view again.` }),
    withBlocks && !episode.blocks.length ? make("p", { class: "soft", text: "The response is empty." }) : null,
    ...(withBlocks ? episode.blocks.map((item) => block(item)) : []));
}

/* The messages of a team's members or of the chats of a program, one colour per speaker. A note has no speaker. */
function messageBlocks(messages) {
  const speakers = [...new Set(messages.map((item) => item.speaker).filter(Boolean))];
  return messages.map((item) => !item.speaker ? make("p", { class: "soft chat", text: item.text }) : block({ role: item.speaker, author: "agent", text: item.text, colour: speakers.indexOf(item.speaker) % COLOURS, code: false }));
}

function block(item, content = null, extra = "") {
  const environment = item.author === "environment";
  const name = item.role || (environment ? "environment" : "text");
  const notes = item.tool ? [item.tool, seconds(item.seconds), item.ok ? "" : "failed", item.duplicate ? "repeated" : ""].filter(Boolean).join(DOT) : environment ? "not trained on" : "";
  return make("section", { class: `block ${environment ? "environment" : ""} ${item.colour === null ? "" : `coloured h${item.colour}`} ${extra}` },
    make("div", { class: "block-head" }, make("span", { text: name }), item.fault ? make("em", { text: item.fault }) : null, notes ? make("small", { text: notes }) : null),
    make("div", { class: `block-text ${item.code ? "code" : ""}`, tabindex: "0" }, content || highlighted(visible(item.text), item.code)));
}

async function tokenBox(id) {
  const { tokens, note } = await ask(`api/episodes/${id}/tokens`);
  const box = make("div", { class: "tokens", tabindex: "0" });
  for (const token of tokens) {
    const surprise = token.logprob === null ? 0 : token.logprob < -3 ? 3 : token.logprob < -1 ? 2 : token.logprob < -0.2 ? 1 : 0;
    const title = [token.trained === null ? "" : token.trained ? "trained" : "masked", token.logprob === null ? "" : `log-probability ${token.logprob.toFixed(3)}`, token.advantage === null ? "" : `advantage ${signed(token.advantage)}`, `id ${token.id}`].filter(Boolean).join(", ");
    const gain = token.advantage === null || token.advantage === 0 ? "" : token.advantage > 0 ? "up" : "down";
    box.append(make("span", { class: token.trained === false ? "masked" : [surprise ? `p${surprise}` : "", gain].filter(Boolean).join(" "), title, text: token.text || "▪" }));
  }
  const legend = make("p", { class: "soft tokens-legend" }, make("span", { text: `${many(tokens.length, "token")}.` }),
    ...tokenLegend(tokens).map(([name, text]) => make("span", { class: name, text })));
  return make("div", {}, legend, make("p", { class: "soft", text: note }), box);
}

/* The entries of the legend, as class and text. Looks that do not occur are left out. */
function tokenLegend(tokens) {
  const some = (test) => tokens.some(test), gains = tokens.map((token) => token.advantage).filter((value) => value !== null);
  const [low, high] = gains.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const below = (limit) => some((token) => token.logprob !== null && token.logprob < limit);
  const range = low === high ? `advantage ${signed(low)}` : `advantage up to ${signed(high)}`;
  return [[some((token) => token.trained === false), "masked", "no loss"],
    [below(-0.2), "p1", "probability below 82 %"], [below(-1), "p2", "below 37 %"], [below(-3), "p3", "below 5 %"],
    [high > 0, "up", range], [low < 0, "down", low === high ? range : `advantage down to ${signed(low)}`]]
    .filter(([shown]) => shown).map(([, name, text]) => [name, text]);
}
