"use strict";
/* Answer the requests of the page from data files, where there is no server. */

const AFM_BUNDLE = window.AFM_BUNDLE = (() => {
  const data = { run: null, episodes: {} };
  const loading = new Map();

  function load(chunk) {
    if (!loading.has(chunk)) {
      loading.set(chunk, new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = `data/episodes-${chunk}.js`;
        script.onload = done;
        script.onerror = () => failed(new Error(`data/episodes-${chunk}.js is missing from this folder`));
        document.head.append(script);
      }));
    }
    return loading.get(chunk);
  }

  const orders = {
    newest: (a, b) => b.id - a.id, slowest: (a, b) => b.seconds - a.seconds, longest: (a, b) => b.tokens - a.tokens,
    calls: (a, b) => b.calls - a.calls, step: (a, b) => (b.step ?? -1) - (a.step ?? -1),
  };
  const has = (item, kind, name) => (kind === "tool" ? item.tool.includes(name) : item[kind] === name);

  /* The words of a text as the index of the server cuts them: letters and figures, without accents and capitals. */
  const words = (text) => ` ${(text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase().match(/[\p{L}\p{N}\p{Co}]+/gu) || []).join(" ")} `;

  /* The words of the question, and those of the response with its tags and messages. */
  function wordsOf(id) {
    const item = data.episodes[id];
    item.words ||= [item.question, [...item.blocks.flatMap((block) => [block.role, block.text, block.role]),
      ...item.messages.map((message) => (message.speaker ? message.text : ""))].join("\n")].map(words);
    return item.words;
  }

  async function listing(query) {
    const text = (query.get("text") || "").trim();
    const parts = [...text.matchAll(/"([^"]+)"|(\S+)/g)].map((match) => words(match[1] || match[2])).filter((part) => part.trim());
    if (text && !parts.length) return { rows: [], total: 0, capped: false };
    if (text) await Promise.all(data.run.rows.map((item, at) => load(Math.floor(at / data.run.chunk))));
    const rows = data.run.rows.filter((item) => data.run.kinds.every((kind) => !query.has(kind) || has(item, kind, query.get(kind)))
      && (!query.get("step") || item.step === Number(query.get("step")))
      && (!query.get("question") || item.question === query.get("question"))
      && parts.every((part) => wordsOf(item.id).some((own) => own.includes(part))));
    if (orders[query.get("order")]) rows.sort(orders[query.get("order")]);
    const offset = Number(query.get("offset") || 0);
    return { rows: rows.slice(offset, offset + Number(query.get("limit") || 100)), total: rows.length, capped: false };
  }

  function facets() {
    return Object.fromEntries(data.run.kinds.map((kind) => {
      const counts = new Map();
      for (const item of data.run.rows) for (const name of kind === "tool" ? item.tool : [item[kind]]) counts.set(name, (counts.get(name) || 0) + 1);
      return [kind, [...counts].map(([name, episodes]) => ({ name, episodes })).sort((a, b) => b.episodes - a.episodes)];
    }));
  }

  function find(query) {
    const file = query.get("file"), ends = (path) => !file || path === file || path.endsWith(`/${file}`) || file.endsWith(`/${path}`);
    return { number: data.run.rows.find((item) => item.name === query.get("name") && ends(item.file))?.id ?? null };
  }

  async function episode(id) {
    const at = data.run.rows.findIndex((item) => item.id === id);
    if (at < 0) throw new Error(`episode ${id} was left out of this bundle`);
    await load(Math.floor(at / data.run.chunk));
    return { row: data.run.rows[at], ...data.episodes[id] };
  }

  async function answer(address) {
    const [path, search] = address.split("?"), query = new URLSearchParams(search), run = data.run;
    const last = path.split("/").pop();
    if (path === "api/episodes") return listing(query);
    if (path === "api/facets") return facets();
    if (path === "api/find") return find(query);
    if (path === "api/files") return run.files;
    if (path === "api/logs") return run.logs;
    if (path === "api/logs/read") return run.logs.find((item) => item.name === query.get("name"));
    if (path === "api/status") return { path: run.name, is_file: false, episodes: run.rows.length, of: run.files.reduce((sum, file) => sum + file.episodes, 0), files: run.files.length, bytes_done: 1, bytes_total: 1, bad_lines: run.files.reduce((sum, file) => sum + file.bad, 0), failure: "" };
    if (path.startsWith("api/files/")) return run.about[last];
    return episode(Number(last));
  }

  const take = (name, value) => { if (name === "run") data.run = value; else Object.assign(data.episodes, value); };
  return { take, answer, leftOut: () => data.run.left_out };
})();
