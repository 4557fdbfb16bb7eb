"use strict";
// What both scripts share: data blocks are JSON, compressed, in base64, and are opened when they are needed.
const rlkit = {
  async open(name) {
    const bytes = Uint8Array.from(atob(document.getElementById(`data-${name}`).textContent), (letter) => letter.charCodeAt(0));
    return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
  },
  make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  },
  draw(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  },
  number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
  },
};

if (!window.DecompressionStream) document.querySelector("main").prepend(rlkit.make("p", "note bad", "This browser cannot open the page's data; use one of 2023 or later."));

// The charts: SVG, redrawn when the axis, the zoom or the lines change. All of them share one state.
(async () => {
  const { make, draw, number } = rlkit;
  const at = (id) => document.getElementById(id);
  if (!at("curve-box")) return;
  const data = await rlkit.open("curves");
  const COLOURS = 8, DASHES = ["", "7 3", "2 2.5", "8 3 2 3"];  // as many as the style sheet has, then dashed
  const WIDE = { left: 54, right: 12, top: 8, bottom: 24, height: 210 };
  const UNITS = { steps: "step", tokens: "tokens trained on", seconds: "seconds" };
  const state = { axis: "steps", log: false, raw: true, hidden: new Set(), zoom: null };
  const charts = [];
  const paint = (group) => ({ class: `line c${group % COLOURS}`, "stroke-dasharray": DASHES[Math.floor(group / COLOURS) % DASHES.length] });

  // ----------------------------------------------------------------------------------------------------- numbers

  for (const group of data.groups) group.at = new Map(group.steps.map((step, i) => [step, i]));
  const across = (group, step) => state.axis === "steps" ? step : data.groups[group].spent[state.axis][data.groups[group].at.get(step)] ?? 0;
  const inside = (x) => !state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]);
  // Round numbers from low to high, about `count` of them.
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || power * 10;
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(+(i * step).toPrecision(10));
    return out;
  }
  // The same as charts.limits: no axis is narrower than its least range.
  function limits(chart, low, high) {
    const least = Math.max(chart.span, 0.1 * Math.max(Math.abs(low), Math.abs(high))) || 1;
    if (high - low >= least) return [low, high];
    const bottom = (low + high) / 2 - least / 2, own = low >= 0 && bottom < 0 ? 0 : bottom;
    return [own, own + least];
  }

  // -------------------------------------------------------------------------------------------------- one chart

  function redraw(chart) {
    const { svg, box } = chart, width = Math.max(220, box.clientWidth), { left, right, top, bottom, height } = WIDE;
    const lines = chart.lines.filter((line) => !state.hidden.has(line.group));
    const points = lines.map((line) => ({ line, x: line.x.map((step) => across(line.group, step)) }));
    const tails = lines.flatMap((line) => line.tails.map((tail) => ({ line, x: tail.x.map((s) => across(line.group, s)), y: tail.y })));
    const raws = state.raw ? lines.filter((l) => l.raw).map((line) => ({ line, x: line.raw.x.map((s) => across(line.group, s)), y: line.raw.y })) : [];
    const xs = [...points, ...tails, ...raws].flatMap((own) => [own.x[0], own.x[own.x.length - 1]]).filter((x) => x !== undefined);
    const from = state.zoom ? state.zoom[0] : Math.min(...xs), to = state.zoom ? state.zoom[1] : Math.max(...xs);
    let low = Infinity, high = -Infinity;
    const see = (x, y) => y.forEach((value, i) => { if (inside(x[i]) && (!state.log || value > 0)) { low = Math.min(low, value); high = Math.max(high, value); } });
    for (const { line, x } of points) [line.y, line.low, line.high].forEach((y) => y && see(x, y));
    for (const own of [...tails, ...raws]) see(own.x, own.y);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    if (!(high >= low) || !xs.length) { svg.replaceChildren(draw("text", { x: width / 2, y: height / 2, class: "none" }, state.log ? "nothing above 0 to show" : "no line is shown")); chart.scale = null; return; }
    let marks;
    if (state.log) {
      [low, high] = [Math.log10(low), Math.log10(high)];
      if (high - low < 0.3) [low, high] = [(low + high) / 2 - 0.15, (low + high) / 2 + 0.15];
      const powers = ticks(Math.floor(low), Math.ceil(high), Math.max(1, Math.min(4, high - low))).filter(Number.isInteger);
      marks = powers.flatMap((e) => (high - low > 2 ? [1] : [1, 2, 5]).map((m) => m * 10 ** e)).filter((v) => Math.log10(v) >= low - 0.01 && Math.log10(v) <= high + 0.01);
    } else {
      [low, high] = limits(chart, low, high);
      marks = ticks(low, high, 4);
    }
    const pad = (high - low) * 0.04, bottomValue = !state.log && low >= 0 && low - pad < 0 ? low : low - pad, topValue = high + pad;
    const X = (x) => left + (x - from) / (to - from || 1) * (width - left - right);
    const Y = (y) => height - bottom - ((state.log ? Math.log10(Math.max(y, 1e-300)) : y) - bottomValue) / (topValue - bottomValue) * (height - top - bottom);
    const drawn = [], frame = { x: left, y: top, width: width - left - right, height: height - top - bottom };
    if (chart.healthy) {
      const [y0, y1] = chart.healthy.map((v) => Math.min(height - bottom, Math.max(top, Y(v))));
      drawn.push(draw("rect", { x: left, width: frame.width, y: y1, height: Math.max(0, y0 - y1), class: "healthy" }));
    }
    for (const mark of marks) drawn.push(draw("line", { x1: left, x2: width - right, y1: Y(mark), y2: Y(mark), class: "grid" }), draw("text", { x: left - 6, y: Y(mark) + 3.5, class: "tick y" }, number(mark)));
    for (const mark of ticks(from, to || 1, width > 380 ? 6 : 4).filter((m) => state.axis !== "steps" || Number.isInteger(m))) drawn.push(draw("text", { x: X(mark), y: height - 8, class: "tick x" }, number(mark)));
    const body = draw("g", { "clip-path": `url(#${chart.clip})` });
    const path = (x, y) => x.map((v, i) => state.log && !(y[i] > 0) ? "" : `${i ? "L" : "M"}${X(v).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("").replace(/^L/, "M");
    for (const { line, x } of points) if (line.low && line.bars) line.low.forEach((bottom, i) => {
      if (bottom < line.high[i] && (!state.log || bottom > 0)) body.append(draw("line", { x1: X(x[i]), x2: X(x[i]), y1: Y(bottom), y2: Y(line.high[i]), class: `bar c${line.group % COLOURS}` }));
    });
    for (const { line, x } of points) if (line.low && !line.bars) {
      const back = line.high.map((v, i) => `L${X(x[i]).toFixed(1)} ${Y(v).toFixed(1)}`).reverse().join("");
      body.append(draw("path", { d: `${path(x, line.low)}${back}Z`, class: `area c${line.group % COLOURS}` }));
    }
    for (const own of raws) body.append(draw("path", { d: path(own.x, own.y), ...paint(own.line.group), "stroke-opacity": 0.35, "stroke-width": 0.9 }));
    for (const own of tails) if (!chart.joined) own.x.forEach((v, i) => body.append(draw("circle", { cx: X(v), cy: Y(own.y[i]), r: 1.8, class: `dot c${own.line.group % COLOURS}` })));
    else body.append(draw("path", { d: path(own.x, own.y), ...paint(own.line.group), "stroke-opacity": 0.6, "stroke-width": 1 }));
    for (const { line, x } of points) {
      if (chart.joined) body.append(draw("path", { d: path(x, line.y), ...paint(line.group) }));
      if (x.length <= 12 || line.bars || !chart.joined) x.forEach((v, i) => { if (!state.log || line.y[i] > 0) body.append(draw("circle", { cx: X(v), cy: Y(line.y[i]), r: 2.6, class: `dot c${line.group % COLOURS}` })); });
    }
    data.groups.forEach((group, index) => { if (!state.hidden.has(index)) group.phases.forEach(([step, name]) => {
      const x = X(across(index, step));
      body.append(draw("line", { x1: x, x2: x, y1: top, y2: height - bottom, class: `phase c${index % COLOURS}` }));
      if (data.groups.length === 1) body.append(draw("text", { x: x + 3, y: top + 9, class: "tick" }, name));
    }); });
    chart.cross = draw("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    chart.select = draw("rect", { class: "select", y: top, height: frame.height, visibility: "hidden" });
    const whole = { ...frame, x: left - 3, width: frame.width + 6 };  // the first and the last point, not half of each
    svg.replaceChildren(draw("clipPath", { id: chart.clip }, draw("rect", whole)), ...drawn, body, chart.cross, chart.select);
    chart.scale = { X, from, to, left, right: width - right, value: (pixel) => from + (pixel - left) / (width - left - right) * (to - from), points };
  }

  // The values of all lines where the pointer is, and a line there in every chart.
  function hover(chart, x) {
    for (const other of charts) if (other.scale) {
      const inView = x !== null && x >= other.scale.from && x <= other.scale.to;
      other.cross.setAttribute("visibility", inView ? "visible" : "hidden");
      if (inView) for (const side of ["x1", "x2"]) other.cross.setAttribute(side, other.scale.X(x));
    }
    chart.tip.hidden = x === null || !chart.scale;
    if (chart.tip.hidden) return;
    const rows = chart.scale.points.filter(({ x: own }) => own.length).map(({ line, x: own }) => {
      let i = own.findIndex((v) => v >= x);
      i = i < 0 ? own.length - 1 : i > 0 && x - own[i - 1] < own[i] - x ? i - 1 : i;
      const row = make("div", `tip-row c${line.group % COLOURS}`);
      row.append(make("b", "", number(line.y[i])));
      if (line.low) row.append(make("span", "bounds", `[${number(line.low[i])}, ${number(line.high[i])}]`));
      if (data.groups.length > 1) row.append(make("span", "name", data.groups[line.group].label));
      return row;
    });
    chart.tip.replaceChildren(make("div", "tip-at", `${UNITS[state.axis]} ${state.axis === "steps" ? Math.round(x) : number(x)}`), ...rows);
    const place = chart.scale.X(x), half = chart.box.clientWidth / 2;
    chart.tip.style.left = place < half ? `${place + 12}px` : "auto";
    chart.tip.style.right = place < half ? "auto" : `${chart.box.clientWidth - place + 12}px`;
  }

  function listen(chart) {
    const { svg } = chart;
    let begun = null, seen = null;
    const where = (event) => Math.min(chart.scale.right, Math.max(chart.scale.left, event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointermove", (event) => {
      if (!chart.scale) return;
      const pixel = where(event);
      seen = chart.scale.value(pixel);
      hover(chart, seen);
      if (begun !== null) {
        chart.select.setAttribute("x", Math.min(begun, pixel));
        chart.select.setAttribute("width", Math.abs(pixel - begun));
        chart.select.setAttribute("visibility", "visible");
      }
    });
    svg.addEventListener("pointerdown", (event) => { if (chart.scale && event.pointerType === "mouse" && !event.button) { begun = where(event); svg.setPointerCapture(event.pointerId); } });
    svg.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const pixel = where(event), ends = [begun, pixel].map(chart.scale.value).sort((a, b) => a - b);
      chart.select.setAttribute("visibility", "hidden");
      if (Math.abs(pixel - begun) > 6) zoom(ends);
      begun = null;
    });
    svg.addEventListener("pointercancel", () => { begun = null; });
    svg.addEventListener("pointerleave", () => hover(chart, null));
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("blur", () => hover(chart, null));
    svg.addEventListener("keydown", (event) => {
      if (!chart.scale) return;
      const { from, to } = chart.scale, wide = to - from, middle = seen ?? (from + to) / 2;
      const work = { ArrowLeft: () => { seen = Math.max(from, middle - wide / 40); hover(chart, seen); }, ArrowRight: () => { seen = Math.min(to, middle + wide / 40); hover(chart, seen); },
        "+": () => zoom([middle - wide / 4, middle + wide / 4]), "-": () => zoom(null), Escape: () => zoom(null) }[event.key];
      if (work) { event.preventDefault(); event.stopPropagation(); work(); }
    });
  }

  function zoom(ends) { state.zoom = ends; at("whole").disabled = !ends; redrawAll(); }
  let soon = 0;
  function redrawAll() { cancelAnimationFrame(soon); soon = requestAnimationFrame(() => charts.forEach((chart) => { if (chart.near) redraw(chart); else chart.stale = true; })); }

  // ----------------------------------------------------------------------------------------------- the page

  function frame(title, unit, files) {
    const box = make("figure", "chart"), head = make("figcaption");
    head.append(make("b", "", title), make("span", "unit", unit));
    if (files) for (const kind of ["svg", "pdf"]) {
      const link = make("a", "file", kind.toUpperCase());
      link.href = `${encodeURIComponent(data.beside)}/${encodeURIComponent(files)}.${kind}`;
      head.append(link);
    }
    box.append(head);
    return box;
  }
  const watcher = new IntersectionObserver((seen) => seen.forEach(({ target, isIntersecting }) => {
    const chart = target.chart;
    chart.near = isIntersecting;
    if (isIntersecting && chart.stale) { chart.stale = false; redraw(chart); }
  }), { rootMargin: "300px" });
  const sizes = new ResizeObserver((seen) => requestAnimationFrame(() => seen.forEach(({ target }) => {
    if (target.chart.near) redraw(target.chart); else target.chart.stale = true;
  })));
  for (const [index, own] of data.charts.entries()) {
    const place = [...document.querySelectorAll("[data-section]")].find((p) => p.dataset.section === own.section);
    const chart = { ...own, clip: `clip-${index}`, stale: true, near: false, box: frame(own.title, own.unit === own.title ? "" : own.unit, data.files.includes(own.name) ? own.name : "") };
    const ends = own.lines.map((line) => `${data.groups[line.group].label}: ${number(line.y[0])} to ${number(line.y[line.y.length - 1])}`);
    chart.svg = draw("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": `${own.title}. ${ends.join("; ")}` });
    chart.tip = make("div", "tip");
    chart.tip.hidden = true;
    chart.box.append(chart.svg, chart.tip);
    chart.box.chart = chart;
    place.append(chart.box);
    charts.push(chart);
    listen(chart);
    watcher.observe(chart.box);
    sizes.observe(chart.box);
  }

  // Bars: rows of parts that add up, or columns of shares.
  function bars(place, title, unit, names, rows, shades, file) {
    const box = frame(title, unit, file), height = 24 * rows.length, most = Math.max(...rows.map((row) => row.values.reduce((a, b) => a + b, 0))) || 1;
    const svg = draw("svg", { class: "plot", viewBox: `0 0 400 ${height + 4}`, role: "img", "aria-label": rows.map((r) => `${r.label}: ${r.values.map((v, i) => `${names[i]} ${number(v)}`).join(", ")}`).join("; ") });
    rows.forEach((row, y) => {
      let x = 0;
      row.values.forEach((value, i) => {
        const wide = value / most * 400;
        svg.append(draw("rect", { x, y: 24 * y + 2, width: wide, height: 20, class: shades[i] }, draw("title", {}, `${row.label}, ${names[i]}: ${number(value)} s`)));
        x += wide;
      });
      svg.append(draw("text", { x: 6, y: 24 * y + 16, class: "on" }, `${row.label}: ${number(row.values.reduce((a, b) => a + b, 0))} s`));
    });
    const key = make("p", "key");
    names.forEach((name, i) => { const one = make("span", shades[i], name); key.append(one); });
    box.append(svg, key);
    place.append(box);
  }
  function columns(place, title, early, late, shade) {
    const box = frame(title, "share of the problems"), wide = 400 / late.length;
    const svg = draw("svg", { class: "plot", viewBox: "0 0 400 150", role: "img", "aria-label": `${title}: at the end ${late.map((v, i) => `${data.bins[i]}: ${Math.round(100 * v)} %`).join(", ")}` });
    late.forEach((value, i) => {
      [[early[i], 0.3, 0.04], [value, 1, 0.48]].forEach(([share, opacity, shift]) => svg.append(
        draw("rect", { x: wide * (i + shift), width: wide * 0.44, y: 130 - 110 * share, height: 110 * share, class: `area-full ${shade}`, "fill-opacity": opacity }),
        draw("text", { x: wide * (i + shift + 0.22), y: 126 - 110 * share, class: "tick x" }, share ? `${Math.round(100 * share)}` : "")));
      svg.append(draw("text", { x: wide * (i + 0.5), y: 145, class: "tick x" }, data.bins[i]));
    });
    box.append(svg);
    place.append(box);
  }
  const time = [...document.querySelectorAll("[data-section]")].find((place) => place.dataset.section === "Time");
  if (time) bars(time, "Where a step's time goes", "mean seconds a step", data.seconds.names, data.seconds.rows.map((values, i) => ({ label: data.groups[i].label, values })), ["part p0", "part p1", "part p2", "part p3"], data.files.includes("where_time_goes") ? "where_time_goes" : "");
  if (at("solved")) data.solved.forEach(([early, late], run) => { if (late.some((v) => v)) columns(at("solved"), data.runs[run], early, late, `c${run % COLOURS}`); });

  const legend = at("legend");
  data.groups.forEach((group, index) => {
    const button = make("button", `c${index % COLOURS}`, group.label);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", (event) => {
      if (event.shiftKey) { const only = state.hidden.size !== data.groups.length - 1 || state.hidden.has(index); state.hidden = new Set(only ? data.groups.keys() : []); if (only) state.hidden.delete(index); }
      else if (!state.hidden.delete(index)) state.hidden.add(index);
      [...legend.children].forEach((own, i) => own.setAttribute("aria-pressed", String(!state.hidden.has(i))));
      redrawAll();
    });
    button.title = "Hide or show; with Shift this one alone";
    legend.append(button);
  });
  legend.hidden = data.groups.length < 2;
  for (const unit of ["tokens", "seconds"]) if (!data.groups.every((group) => group.spent[unit])) at("axis").querySelector(`[value=${unit}]`).disabled = true;
  document.querySelector("[data-for=raw]").hidden = !data.charts.some((chart) => chart.lines.some((line) => line.raw));
  at("axis").addEventListener("change", () => { state.axis = at("axis").value; state.zoom = null; at("whole").disabled = true; redrawAll(); });
  at("log").addEventListener("change", () => { state.log = at("log").checked; redrawAll(); });
  at("raw").addEventListener("change", () => { state.raw = at("raw").checked; redrawAll(); });
  at("whole").addEventListener("click", () => zoom(null));
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("beforeprint", () => charts.forEach(redraw));
})();
