// The conversation viewer: a list of all of them, and pages that are opened when one is read. What a model wrote is set by textContent
// and by nothing else.
(async () => {
  const theme = document.getElementById("theme");
  const dark = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() === "dark" ? "light" : "dark"; });

  const at = (id) => document.getElementById(id), { make } = rlkit;
  if (!at("viewer")) return;
  const data = await rlkit.open("list");
  const all = data.rollouts;
  const ROW = 58, MARGIN = 6, NEAR = 20, OPEN = 6, OTHERS = 80;
  let shown = [], chosen = -1, open = false, soon = 0, beside = null;

  // ------------------------------------------------------------------------------------------------------- pages

  const pages = new Map();  // page → its texts and what was said, of the pages that were read last
  async function page(number) {
    if (!pages.has(number)) pages.set(number, rlkit.open(`page-${number}`));
    const own = pages.get(number);
    pages.delete(number);
    pages.set(number, own);
    if (pages.size > OPEN) pages.delete(pages.keys().next().value);
    return own;
  }
  const reward = (value) => value === null || value === undefined ? "not scored" : Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value * 1000) / 1000);
  const figure = (entry) => at("component").value === "" ? entry.reward : entry.rewards[at("component").value] ?? null;
  const textOf = (message, texts) => message.prompt === undefined ? message.text || "" : texts[message.prompt];

  // --------------------------------------------------------------------------------------------------- filtering

  const fields = ["search", "run", "kind", "step-low", "step-high", "component", "reward-low", "reward-high", "status", "tools", "problem", "sort"];
  let sought = "", hits = null;  // the words that were searched for, and the entries that hold them; null: all do
  // Reads every page for the words, a few at a time; an older search gives way to a newer one.
  async function search(text) {
    if (text === sought) return true;
    sought = text;
    hits = null;
    if (!text) return true;
    const found = new Set(), byPage = new Map();
    all.forEach((entry) => { if (!byPage.has(entry.page)) byPage.set(entry.page, []); byPage.get(entry.page).push(entry); });
    let read = 0;
    for (const [number, entries] of byPage) {
      const { texts, said } = pages.has(number) ? await page(number) : await rlkit.open(`page-${number}`);
      if (sought !== text) return false;
      for (const entry of entries) {
        const own = said[entry.at];
        const words = own.messages.map((m) => [textOf(m, texts), m.thinking || "", ...(m.calls || []).map((c) => `${c.name} ${c.arguments} ${c.error}`)].join(" "));
        if ([entry.problem, own.expected, ...words].join("\n").toLowerCase().includes(text)) found.add(entry);
      }
      if (++read % 8 === 0) at("count").textContent = `searching, ${Math.round(100 * read / byPage.size)} %`;
    }
    hits = found;
    return true;
  }
  function within(value, low, high) {
    if (low === "" && high === "") return true;
    return value !== null && (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
  }
  async function apply(keep) {
    const f = Object.fromEntries(fields.map((name) => [name, at(name).value]));
    if (!await search(f.search.trim().toLowerCase())) return;
    const before = shown[chosen];
    shown = all.filter((e) =>
      (f.run === "" || e.run === Number(f.run)) && (f.kind === "" || e.kind === f.kind) && (f.status === "" || e.status === f.status)
      && (f.problem === "" || e.problem === f.problem) && within(e.step, f["step-low"], f["step-high"])
      && within(figure(e), f["reward-low"], f["reward-high"])
      && (f.tools === "" || (f.tools === "called" && e.calls > 0) || (f.tools === "failed" && e.failed > 0) || (f.tools === "none" && e.calls === 0))
      && (hits === null || hits.has(e)));
    const key = f.sort.replace("-", ""), sign = f.sort.startsWith("-") ? -1 : 1;
    const by = new Map(shown.map((e) => [e, key === "reward" ? figure(e) : e[key]])), order = new Map(shown.map((e, i) => [e, i]));
    shown.sort((a, b) => {
      const x = by.get(a), y = by.get(b);
      if ((x === null) !== (y === null)) return x === null ? 1 : -1;  // what is not scored comes last
      return sign * (x - y) || order.get(a) - order.get(b);
    });
    at("count").textContent = `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} conversations`;
    at("space").style.height = `${shown.length * ROW}px`;
    const kept = keep ? shown.indexOf(before) : -1;
    select(kept >= 0 ? kept : shown.length ? 0 : -1, true);
  }

  // -------------------------------------------------------------------------------------------------------- list

  function rows() {
    const list = at("list"), space = at("space");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - MARGIN);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + MARGIN);
    const drawn = [];
    for (let i = first; i < last; i++) drawn.push(row(shown[i], i));
    space.replaceChildren(...drawn);
    if (chosen >= 0) list.setAttribute("aria-activedescendant", `row-${chosen}`); else list.removeAttribute("aria-activedescendant");
  }
  function row(entry, index) {
    const out = make("div", "row"), top = make("div");
    out.id = `row-${index}`;
    out.setAttribute("role", "option");
    out.setAttribute("aria-selected", String(index === chosen));
    out.setAttribute("aria-setsize", String(shown.length));
    out.setAttribute("aria-posinset", String(index + 1));
    out.style.top = `${index * ROW}px`;
    const mark = entry.failed ? " · call failed" : entry.calls ? ` · ${entry.calls} call${entry.calls > 1 ? "s" : ""}` : "";
    const cut = entry.status === "terminated" ? "" : ` · ${entry.status.replace("truncated: ", "cut: ")}`;
    top.append(make("span", "", `${entry.kind === "episodes" ? "episode" : `step ${entry.step}`}${["test", "validation"].includes(entry.kind) ? ` · ${entry.kind}` : ""}${mark}${cut}`),
      make("span", "reward", reward(figure(entry))));
    out.append(top, make("p", "", entry.answer.replace(/\s+/g, " ")));
    out.addEventListener("click", () => { select(index, false); at("list").focus({ preventScroll: true }); });
    return out;
  }
  function select(index, reset) {
    chosen = index;
    const list = at("list");
    if (reset && index <= 0) list.scrollTop = 0;
    else if (index * ROW < list.scrollTop) list.scrollTop = index * ROW;
    else if ((index + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * ROW - list.clientHeight;
    rows();
    cancelAnimationFrame(soon);
    soon = requestAnimationFrame(detail);  // of many moves in one frame the last is drawn
  }
  const show = async (entry) => {
    if (!shown.includes(entry)) { at("filters").reset(); await apply(false); }
    select(shown.indexOf(entry), false);
  };

  // ------------------------------------------------------------------------------------------------ conversation

  async function detail() {
    const box = at("detail");
    if (chosen < 0) { box.replaceChildren(make("p", "empty", "No conversation fits these filters.")); return; }
    const entry = shown[chosen];
    if (beside && beside.problem !== entry.problem) beside = null;
    const both = beside ? [entry, beside] : [entry];
    const opened = await Promise.all(both.map((own) => page(own.page)));
    if (shown[chosen] !== entry) return;
    const sides = both.map((own, i) => conversation(own, opened[i]));
    const out = make("div", beside ? "sides" : "");
    out.append(...sides);
    box.classList.toggle("two", Boolean(beside));
    box.replaceChildren(tools(entry, opened[0].said[entry.at]), out, story(entry));
    box.scrollTop = 0;
  }
  function conversation(entry, { texts, said }) {
    const out = make("div"), head = make("div", "head"), own = said[entry.at];
    head.append(make("b", "", entry.problem));
    if (data.runs.length > 1) head.append(make("span", "", data.runs[entry.run]));
    head.append(make("span", "", entry.kind === "episodes" ? "episode" : `step ${entry.step}, ${entry.kind}`), make("span", "", `sample ${entry.sample}`));
    head.append(make("b", "", `reward ${reward(entry.reward)}`));
    for (const [name, value] of Object.entries(entry.rewards)) head.append(make("span", "", `${name} ${reward(value)}`));
    head.append(make("span", "", entry.status), make("span", "", `${entry.tokens} tokens${entry.turns > 1 ? ` in ${entry.turns} turns` : ""}`));
    if (entry.versions.length) head.append(make("span", "", `sampled after step ${entry.versions.join(", ")}`));
    if (own.expected) head.append(make("span", "", `expected: ${own.expected.slice(0, 200)}`));
    out.append(head, ...own.messages.map((m) => message(m, texts)));
    if (entry.why && entry.tokens) out.append(token(entry));
    return out;
  }
  // The command that explains one of the conversation's sampled tokens.
  function token(entry) {
    const out = make("p", "why"), label = make("label", "", "Why token "), pick = make("input"), code = make("code");
    const copy = make("button", "", "Copy"), say = () => { code.textContent = entry.why + (pick.value || 0); };
    Object.assign(pick, { type: "number", min: 0, max: entry.tokens - 1, value: 0 });
    copy.type = "button";
    pick.addEventListener("input", say);
    copy.addEventListener("click", () => navigator.clipboard?.writeText(code.textContent));
    say();
    label.append(pick, ` of 0 to ${entry.tokens - 1}:`);
    out.append(label, code, copy);
    return out;
  }
  function tools(entry, own) {
    const out = make("div", "tools");
    const fold = make("button", "", open ? "Fold thinking" : "Unfold thinking");
    fold.type = "button"; fold.id = "fold";
    fold.addEventListener("click", async () => { await thinking(); at("fold")?.focus(); });
    if (own.messages.some((m) => m.thinking !== undefined)) out.append(fold);
    const others = rivals(entry);
    if (!others.length) return out;
    const pick = make("select"), label = make("label", "", "Beside it ");
    pick.id = "beside";
    pick.append(new Option("nothing", ""), ...others.map((e, i) => new Option(`${data.runs.length > 1 ? `${data.runs[e.run]}, ` : ""}${e.kind === "episodes" ? "" : `step ${e.step}, `}sample ${e.sample}: ${reward(e.reward)}`, String(i))));
    pick.value = beside ? String(others.indexOf(beside)) : "";
    pick.addEventListener("change", async () => { beside = pick.value === "" ? null : others[Number(pick.value)]; await detail(); at("beside")?.focus(); });
    label.append(pick);
    out.append(label);
    return out;
  }
  // Other conversations on the same problem, the most alike first: of other runs, at the nearest step, the same sample.
  const everywhere = new Map();
  for (const entry of all) { if (!everywhere.has(entry.problem)) everywhere.set(entry.problem, []); everywhere.get(entry.problem).push(entry); }
  const rivals = (entry) => everywhere.get(entry.problem).filter((e) => e !== entry)
    .map((e) => [e, (e.run === entry.run) * 1e9 + (e.kind !== entry.kind) * 1e8 + Math.abs(e.step - entry.step) * 1e3 + Math.abs(e.sample - entry.sample)])
    .sort((a, b) => a[1] - b[1]).slice(0, OTHERS).map(([e]) => e);
  function compare() {
    if (chosen < 0) return;
    beside = beside ? null : rivals(shown[chosen])[0] || null;
    detail();
  }
  function thinking() { open = !open; return detail(); }

  function message(m, texts) {
    const out = make("div", `message ${m.role}${m.role === "tool" && !m.ok ? " failed" : ""}`);
    const role = make("div", "role");
    role.append(make("span", "", m.turn ? `${m.role}, turn ${m.turn}` : m.role === "tool" ? `result of ${m.name}${m.ok ? "" : ", failed"}` : m.role));
    if (m.role === "assistant") role.append(make("span", "", `${m.reward === undefined ? "" : `reward ${reward(m.reward)} · `}${m.tokens} token${m.tokens === 1 ? "" : "s"} · ${m.why === "length" ? "cut off" : m.why}`));
    out.append(role);
    if (m.thinking !== undefined) {
      const fold = make("details", "thinking");
      fold.open = open;
      fold.append(make("summary", "", `thinking, ${m.thinking.length.toLocaleString("en")} characters${m.closed ? "" : ", never closed"}`), make("div", "text", m.thinking));
      out.append(fold);
    }
    const text = textOf(m, texts);
    if (text) out.append(make("div", "text", text));
    for (const call of m.calls || []) {
      const own = make("div", "call");
      own.append(make("b", "", `→ ${call.name || "unreadable call"}`), document.createTextNode(call.arguments === "{}" ? "()" : `(${call.arguments})`));
      if (call.error) own.append(make("span", "error", call.error));
      out.append(own);
    }
    if (!text && !m.calls && m.thinking === undefined) out.append(make("div", "role", "(empty)"));
    return out;
  }
  // ---------------------------------------------------------------------------------- one problem over training

  const siblings = new Map();
  for (const entry of all) {
    const key = `${entry.run} ${entry.problem}`;
    if (!siblings.has(key)) siblings.set(key, []);
    siblings.get(key).push(entry);
  }
  for (const own of siblings.values()) own.sort((a, b) => a.step - b.step || a.sample - b.sample);
  const same = (entry) => siblings.get(`${entry.run} ${entry.problem}`);
  function story(entry) {
    const own = same(entry), out = make("div");
    if (own.length < 2) return out;
    const steps = new Set(own.map((e) => e.step)).size;
    out.append(make("h3", "", steps > 1 ? `Answers to this problem over ${steps} steps` : `The ${own.length} answers to this problem`));
    const table = make("table", "story"), body = make("tbody");
    const middle = own.indexOf(entry), first = Math.max(0, Math.min(middle - NEAR, own.length - 2 * NEAR));
    own.slice(first, first + 2 * NEAR).forEach((e) => {
      const line = make("tr", e === entry ? "here" : "");
      line.dataset.at = "1";
      line.append(make("td", "", e.kind === "episodes" ? `sample ${e.sample}` : `step ${e.step}`), make("td", "", reward(figure(e))), make("td", "", e.answer));
      line.addEventListener("click", () => show(e));
      body.append(line);
    });
    table.append(body);
    if (own.length > 2 * NEAR) out.append(make("p", "note", `the ${2 * NEAR} nearest of ${own.length}`));
    out.append(table);
    return out;
  }
  function along(by) {
    if (chosen < 0) return;
    const own = same(shown[chosen]), next = own[own.indexOf(shown[chosen]) + by];
    if (next) show(next);
  }

  // ---------------------------------------------------------------------------------------------------- controls

  function options(id, any, values) { at(id).replaceChildren(new Option(any, ""), ...values.map(([value, name]) => new Option(name, value))); }
  const components = [...new Set(all.flatMap((e) => Object.keys(e.rewards)))];
  options("component", "reward", components.map((name) => [name, name]));
  document.querySelector("[data-for=component]").hidden = !components.length;
  options("run", "all", data.runs.map((name, i) => [String(i), name]));
  document.querySelector("[data-for=run]").hidden = data.runs.length < 2;
  options("kind", "all", [...new Set(all.map((e) => e.kind))].map((k) => [k, k]));
  options("status", "any", [...new Set(all.map((e) => e.status))].sort().map((s) => [s, s]));
  const often = new Map();
  for (const own of siblings.values()) {
    const steps = new Set(own.map((e) => e.step)).size;
    if (steps > 1) often.set(own[0].problem, Math.max(steps, often.get(own[0].problem) || 0));
  }
  options("problem", "all", [...often].sort((a, b) => b[1] - a[1]).slice(0, 300).map(([p, n]) => [p, `${p} (${n} steps)`]));

  let waiting = 0;
  const later = (work) => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(work); };
  let typed = 0;
  at("filters").addEventListener("input", (event) => { clearTimeout(typed); typed = setTimeout(() => later(() => apply(true)), event.target.id === "search" ? 150 : 0); });
  at("filters").addEventListener("reset", () => setTimeout(() => apply(true)));
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("list").addEventListener("scroll", () => requestAnimationFrame(rows), { passive: true });
  new ResizeObserver(() => requestAnimationFrame(rows)).observe(at("list"));
  const random = () => { if (shown.length) select(Math.floor(Math.random() * shown.length), false); };
  at("best").addEventListener("click", () => { at("sort").value = "-reward"; apply(false); });
  at("worst").addEventListener("click", () => { at("sort").value = "reward"; apply(false); });
  at("random").addEventListener("click", random);

  const move = (by) => { if (shown.length) select(Math.min(shown.length - 1, Math.max(0, chosen + by)), false); };
  const screen = () => Math.max(1, Math.floor(at("list").clientHeight / ROW) - 1);
  const onList = { ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(screen()), PageUp: () => move(-screen()),
    Home: () => move(-shown.length), End: () => move(shown.length), Enter: () => at("detail").focus() };
  at("list").addEventListener("keydown", (event) => {
    const work = event.ctrlKey || event.metaKey || event.altKey ? null : onList[event.key];
    if (work) { event.preventDefault(); work(); }
  });
  const anywhere = { j: () => move(1), k: () => move(-1), n: () => along(1), p: () => along(-1), t: thinking, c: compare, r: random,
    "/": () => at("search").focus() };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && at("conversations").contains(event.target)) { at("list").focus(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const work = anywhere[event.key];
    if (work) { event.preventDefault(); work(); }
  });
  apply(false);
})();
