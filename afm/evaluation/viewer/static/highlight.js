"use strict";
/* Colour code in one pass: words, strings, numbers and comments. It makes only text nodes and spans. */

const words = (text) => new Set(text.split(" "));
const LANGUAGES = {
  python: { comment: "#", words: words("and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield") },
  bash: { comment: "#", words: words("case do done elif else esac exit export fi for function if in local return set then until while") },
  javascript: { comment: "//", words: words("async await break case catch class const continue else export false finally for function if import let new null of return static switch this throw true try typeof undefined var while") },
  sql: { comment: "--", words: words("select from where and or not in is null insert into values update set delete create table join left right inner outer on group by order limit having as distinct union SELECT FROM WHERE AND OR NOT IN IS NULL INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER OUTER ON GROUP BY ORDER LIMIT HAVING AS DISTINCT UNION") },
  json: { comment: null, words: words("true false null") },
};
const SAME = { py: "python", python3: "python", sh: "bash", shell: "bash", js: "javascript", ts: "javascript", typescript: "javascript" };
const TOKEN = /(\/\/[^\n]*|--[^\n]*|#[^\n]*)|("""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;
const FENCE = /^([ \t]*```)([\w+-]*)[^\n]*\n([^]*?)(?:^[ \t]*```[ \t]*$|(?![^]))/gm;
const PYTHON = /^(?:import \w|from \w[\w.]* import |def \w+\(|class \w|print\(|#|\w+ = |for \w.* in .*:$)/;

function coloured(code, language) {
  const rules = LANGUAGES[SAME[language] || language], out = document.createDocumentFragment();
  if (!rules) { out.append(code); return out; }
  let at = 0;
  const put = (name, match, length) => {
    out.append(code.slice(at, match.index), make("span", { class: `code-${name}`, text: match[0].slice(0, length) }));
    at = match.index + length;
    TOKEN.lastIndex = at;
  };
  TOKEN.lastIndex = 0;
  for (let match; (match = TOKEN.exec(code));) {
    if (match[1]) {
      if (rules.comment && match[0].startsWith(rules.comment)) put("comment", match, match[0].length);
      else TOKEN.lastIndex = match.index + 1;
    } else if (match[2]) put("text", match, match[0].length);
    else if (match[3]) put("number", match, match[0].length);
    else if (rules.words.has(match[4])) put("word", match, match[0].length);
  }
  out.append(code.slice(at));
  return out;
}

/* Colour the fenced blocks of a text. Text that is all code is recognised by its first line. */
function highlighted(text, isCode) {
  const out = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(FENCE)) {
    const inside = match.index + match[0].indexOf("\n") + 1;
    out.append(text.slice(at, inside), coloured(match[3], match[2].toLowerCase() || "python"));
    at = inside + match[3].length;
  }
  if (at === 0 && isCode && PYTHON.test(text)) return coloured(text, "python");
  if (at === 0 && isCode && /^[[{]\s*["{[\d\]}]/.test(text)) return coloured(text, "json");
  out.append(text.slice(at));
  return out;
}
