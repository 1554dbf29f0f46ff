"use strict";
/* Two episodes of a question, step next to step, with the words that differ marked. */

const MAX_STEPS = 400;
const MAX_TABLE = 4_000_000;
const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const GAP = 0, ROLE = 0.2;

/* Align the steps that are most alike, in order (Needleman and Wunsch 1970). Returns pairs of indices, null for a gap. */
function alignSteps(left, right) {
  if (left.length > MAX_STEPS || right.length > MAX_STEPS) {
    return Array.from({ length: Math.max(left.length, right.length) }, (_, at) => [at < left.length ? at : null, at < right.length ? at : null]);
  }
  const sets = [left, right].map((blocks) => blocks.map((item) => new Set(item.text.slice(0, 4000).match(WORDS))));
  const width = right.length + 1, best = new Float64Array((left.length + 1) * width);
  const alike = (i, j) => {
    if (left[i].role !== right[j].role || left[i].author !== right[j].author) return -1;
    const [a, b] = [sets[0][i], sets[1][j]];
    let both = 0;
    for (const word of a) both += b.has(word);
    return ROLE + both / Math.max(1, a.size + b.size - both);
  };
  const score = Array.from(left, (_, i) => Float64Array.from(right, (__, j) => alike(i, j)));
  for (let i = left.length - 1; i >= 0; i--) {
    for (let j = right.length - 1; j >= 0; j--) {
      best[i * width + j] = Math.max(score[i][j] + best[(i + 1) * width + j + 1], GAP + best[(i + 1) * width + j], GAP + best[i * width + j + 1]);
    }
  }
  const out = [];
  let i = 0, j = 0;
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && score[i][j] > 0 && best[i * width + j] === score[i][j] + best[(i + 1) * width + j + 1]) out.push([i++, j++]);
    else if (j >= right.length || (i < left.length && best[i * width + j] === GAP + best[(i + 1) * width + j])) out.push([i++, null]);
    else out.push([null, j++]);
  }
  return out;
}

/* For each side, the words and whether each differs, from the longest common subsequence between equal ends. */
function wordDifferences(left, right) {
  const a = left.match(WORDS) || [], b = right.match(WORDS) || [];
  let start = 0, tail = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (tail < a.length - start && tail < b.length - start && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const n = a.length - start - tail, m = b.length - start - tail;
  const common = [new Set(), new Set()];
  if (n * m && n * m <= MAX_TABLE) {
    const width = m + 1, longest = new Uint16Array((n + 1) * width);
    for (let i = n - 1; i >= 0; i--) {
      for (let j = m - 1; j >= 0; j--) {
        longest[i * width + j] = a[start + i] === b[start + j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
      }
    }
    for (let i = 0, j = 0; i < n && j < m;) {
      if (a[start + i] === b[start + j]) { common[0].add(start + i++); common[1].add(start + j++); }
      else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
      else j++;
    }
  }
  const marked = (all, same) => all.map((word, at) => [word, at >= start && at < all.length - tail && !same.has(at)]);
  return [marked(a, common[0]), marked(b, common[1])];
}

function markedText(parts, className) {
  const out = document.createDocumentFragment();
  for (let at = 0; at < parts.length;) {
    let end = at;
    while (end < parts.length && parts[end][1] === parts[at][1]) end++;
    const text = visible(parts.slice(at, end).map((part) => part[0]).join(""));
    out.append(parts[at][1] ? make("mark", { class: className, text }) : text);
    at = end;
  }
  return out;
}

function differences(first, second) {
  const out = make("div", { class: "pairs" });
  let equal = 0;
  const steps = alignSteps(first.blocks, second.blocks);
  for (const [i, j] of steps) {
    const left = i === null ? null : first.blocks[i], right = j === null ? null : second.blocks[j];
    const same = left && right && left.text === right.text;
    equal += Boolean(same);
    const parts = left && right && !same ? wordDifferences(left.text, right.text) : null;
    const cell = (item, at) => (item ? block(item, parts ? markedText(parts[at], at ? "new" : "old") : null, `${at ? "second" : "first"} ${!left || !right ? "only" : ""}`) : make("p", { class: "gap soft", text: "not in this episode" }));
    out.append(make("div", { class: `pair ${same ? "same" : ""}` }, cell(left, 0), cell(right, 1)));
  }
  return [make("p", { class: "soft", text: `${equal ? `${equal} of ${many(steps.length, "step")} ${equal === 1 ? "is" : "are"} equal, shown without colour.` : "No step is equal."} Words that differ are marked: red in the first episode, green in the second.` }), out];
}
