"use strict";
(() => {
  // Names of a run are keys here: without a prototype, "constructor" is one like any other.
  const bare = (value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.setPrototypeOf(value, null) : value);
  const facts = JSON.parse(document.getElementById("data").textContent, (key, value) => bare(value));
  const runs = facts.runs;
  const COLORS = ["#3b82f6", "#f97316", "#10b981", "#e11d48", "#a855f7", "#0891b2", "#ca8a04", "#ec4899", "#65a30d", "#8b7355"];
  const MARKS = bare({
    checkpoint: ["#64748b", "▲"], resume: ["#10b981", "↻"], kill: ["#e11d48", "✕"],
    failure: ["#e11d48", "!"], rollback: ["#f97316", "↩"], spike: ["#f97316", "⇑"], preempt: ["#a855f7", "◼"],
    "lost rank": ["#e11d48", "?"],
  });
  const PARTS = {
    useful: ["#10b981", "steps that count"], start: ["#3b82f6", "start, to the first batch"],
    compile: ["#a855f7", "torch.compile"], data: ["#eab308", "waiting for data"],
    save: ["#64748b", "stopped for a save"], evaluation: ["#0891b2", "evaluations"],
    repeated: ["#f97316", "steps taken again, or left out"],
    recovery: ["#e11d48", "from a failure to the next batch"], other: ["#94a3b8", "after the last step"],
  };
  const UNSMOOTHED = new Set(["learning rate"]);
  const MOST_SPREADS = 4; // runs in one chart with the lowest and highest values around their lines
  const NEAR = 8; // pixels between the cursor and a mark that it tells of
  const color = (run) => COLORS[runs.indexOf(run) % COLORS.length];
  const markOf = (kind) => MARKS[kind] || ["#ca8a04", "◆"];
  const id = (name) => document.getElementById(name);

  // Texts of the runs enter the page as text only, never as HTML.
  function element(tag, options = {}, ...children) {
    const node = document.createElement(tag);
    const { style, ...properties } = options;
    Object.assign(node, properties);
    Object.assign(node.style, style || {});
    node.append(...children);
    return node;
  }
  const swatch = (background) => element("span", { className: "swatch", style: { background } });
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
  }
  function duration(seconds) {
    const sign = seconds < 0 ? "-" : "";
    const size = Math.abs(seconds);
    if (size < 120) return `${sign}${+size.toPrecision(3)}\u00a0s`;
    if (size < 7200) return `${sign}${+(size / 60).toPrecision(3)}\u00a0min`;
    if (size < 172800) return `${sign}${+(size / 3600).toPrecision(3)}\u00a0h`;
    return `${sign}${+(size / 86400).toPrecision(3)}\u00a0d`;
  }

  // --- the choices of the reader ------------------------------------------------------------

  const shown = new Set(runs);
  const choice = () => ({
    axis: id("axis").value, smoothing: +id("smoothing").value, log: id("log").checked,
    clip: id("clip").checked, marked: id("marked").checked,
  });

  // An average that forgets, without the pull of its start towards zero.
  function smooth(values, weight) {
    if (!weight) return values;
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // --- curves -------------------------------------------------------------------------------

  function range(values) {
    const sorted = values.filter((value) => value != null).sort((a, b) => a - b);
    if (!sorted.length) return null;
    const low = sorted[Math.floor(sorted.length * 0.01)];
    const high = sorted[Math.ceil(sorted.length * 0.99) - 1];
    return low < high ? [low, high] : null;
  }

  function drawMarks(plot, drawn, axis) {
    const { left, top, width, height } = plot.bbox;
    const context = plot.ctx, ratio = devicePixelRatio;
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const run of drawn) {
      const taken = new Set(); // marks of one kind on one pixel are one
      for (const mark of run.marks) {
        const x = Math.round(plot.valToPos(mark[axis], "x", true));
        if (x < left || x > left + width || taken.has(mark.kind + x)) continue;
        taken.add(mark.kind + x);
        const [markColor, glyph] = markOf(mark.kind);
        context.strokeStyle = context.fillStyle = runs.length > 1 ? color(run) : markColor;
        context.lineWidth = ratio;
        context.beginPath();
        if (mark.kind === "checkpoint") {
          context.moveTo(x, top + height);
          context.lineTo(x - 4 * ratio, top + height + 6 * ratio);
          context.lineTo(x + 4 * ratio, top + height + 6 * ratio);
          context.fill();
        } else {
          context.setLineDash([4 * ratio, 4 * ratio]);
          context.moveTo(x, top);
          context.lineTo(x, top + height);
          context.stroke();
          context.fillText(glyph, x, top - 14 * ratio);
        }
      }
    }
    context.restore();
  }

  class Chart {
    constructor(title) {
      this.title = title;
      this.visible = false;
      this.plot = null;
      this.area = element("div", { className: "plot" });
      this.readout = element("div", { className: "readout" });
      this.near = element("div", { className: "near" });
      this.node = element("section", { className: "chart" }, element("h3", { textContent: title }), this.area, this.readout, this.near);
    }

    draw() {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      const options = choice(), axis = options.axis;
      const drawn = this.drawn = runs.filter((run) => shown.has(run) && run.curves[this.title]);
      if (!drawn.length) {
        this.readout.replaceChildren("no run that is shown has it");
        return;
      }
      const positive = (values) => options.log ? values.map((value) => (value > 0 ? value : null)) : values;
      const weight = UNSMOOTHED.has(this.title) ? 0 : options.smoothing;
      const middles = [];
      const tables = drawn.map((run) => {
        const curve = run.curves[this.title];
        const middle = positive(curve.mean);
        middles.push(...middle);
        return [curve[axis], positive(smooth(curve.mean, weight)), positive(curve.low || curve.mean), positive(curve.high || curve.mean)];
      });
      const data = this.data = tables.length > 1 ? uPlot.join(tables) : tables[0];
      const fixed = options.clip ? range(middles) : null;
      const series = [{}], bands = [];
      drawn.forEach((run, index) => {
        const line = color(run), first = 1 + 3 * index;
        const faint = { stroke: line + "55", width: 1, points: { show: false }, show: drawn.length <= MOST_SPREADS };
        series.push({ stroke: line, width: 2, points: { show: data[0].length < 3 } }, faint, { ...faint });
        bands.push({ series: [first + 2, first + 1], fill: line + "22" });
      });
      const line = css("--quiet"), grid = { stroke: css("--grid"), width: 1 };
      const common = { stroke: line, grid, ticks: grid };
      const xText = axis === "time" ? (plot, splits) => splits.map(duration) : (plot, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : ""));
      const yText = (plot, splits) => splits.map((value) => (value == null ? "" : number(+value.toPrecision(3))));
      this.plot = new uPlot({
        width: this.area.clientWidth, height: this.area.clientHeight, legend: { show: false },
        padding: [16, 24, 0, 0], series, bands,
        scales: {
          x: { time: false },
          y: { distr: options.log ? 3 : 1, ...(fixed ? { range: () => fixed } : {}) },
        },
        axes: [{ ...common, values: xText }, { ...common, values: yText, size: 64 }],
        cursor: {
          sync: { key: "runs", setSeries: false }, points: { size: 6 },
          dataIdx: (plot, index, hovered) => (index ? this.nearest(index, hovered) : hovered),
        },
        hooks: {
          draw: [(plot) => options.marked && drawMarks(plot, drawn, axis)],
          setCursor: [(plot) => this.tell(plot)],
        },
      }, data, this.area);
      this.tell(this.plot);
    }

    // The point of a run that is nearest to where another run has one.
    nearest(index, hovered) {
      const values = this.data[index], steps = this.data[0];
      let before = hovered, after = hovered;
      while (before >= 0 && values[before] == null) before--;
      while (after < values.length && values[after] == null) after++;
      if (before < 0) return after < values.length ? after : hovered;
      if (after >= values.length) return before;
      return steps[hovered] - steps[before] <= steps[after] - steps[hovered] ? before : after;
    }

    tell(plot) {
      const { axis, marked } = choice();
      const { left, idx } = plot.cursor;
      const hovered = idx != null && left >= 0 ? idx : this.data[0].length - 1;
      const place = this.data[0][hovered];
      const texts = [element("span", { className: "quiet", textContent: axis === "time" ? duration(place) : `step ${place}` })];
      this.drawn.forEach((run, position) => {
        const first = 1 + 3 * position, at = this.nearest(first, hovered);
        const [middle, low, high] = [0, 1, 2].map((offset) => this.data[first + offset][at]);
        const spread = low != null && low !== high ? ` (${number(low)} to ${number(high)})` : low != null && low !== middle ? ` (${number(low)})` : "";
        const name = runs.length > 1 ? `${run.label} ` : "";
        texts.push(element("span", {}, swatch(color(run)), `${name}${number(middle)}${spread}`));
      });
      this.near.textContent = "";
      if (marked && left >= 0) {
        const distance = (mark) => Math.abs(plot.valToPos(mark[axis], "x") - left);
        const near = this.drawn.flatMap((run) => run.marks).filter((mark) => distance(mark) <= NEAR);
        near.sort((a, b) => distance(a) - distance(b));
        if (near.length) this.near.textContent = markText(near[0]);
      }
      this.readout.replaceChildren(...texts);
    }
  }

  function markText(mark) {
    const text = mark.text ? `: ${mark.text}` : "";
    return `${markOf(mark.kind)[1]} ${mark.kind} at step ${mark.step}, ${duration(mark.time)}${text}`;
  }

  // --- tables and bars ----------------------------------------------------------------------

  function table(head, rows) {
    const numeric = head.map((title, column) => rows.every((row) => typeof row[column] === "number" || row[column] === "–"));
    const cell = (tag) => (value, column) => {
      const content = value instanceof Node ? value : String(value);
      return element(tag, { className: numeric[column] && column ? "number" : "text" }, content);
    };
    const body = rows.map((row) => element("tr", {}, ...row.map(cell("td"))));
    return element("div", { className: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ...head.map(cell("th")))), element("tbody", {}, ...body)));
  }
  const named = (run) => element("span", {}, swatch(color(run)), run.label);
  const heading = (text) => element("h2", { textContent: text });

  function goodput() {
    const nodes = [heading("Where the time went")];
    const present = Object.keys(PARTS).filter((part) => runs.some((run) => run.goodput[part] > 0));
    for (const run of runs) {
      const whole = Object.values(run.goodput).reduce((sum, seconds) => sum + seconds, 0);
      const bars = present.map((part) => element("div", {
        title: `${PARTS[part][1]}: ${duration(run.goodput[part])}`,
        style: { width: `${whole ? (run.goodput[part] / whole) * 100 : 0}%`, background: PARTS[part][0] },
      }));
      const text = `${(run.share * 100).toFixed(1)} % of ${duration(whole)} went into steps that count`;
      nodes.push(element("p", {}, named(run), " ", element("span", { className: "quiet", textContent: text })), element("div", { className: "bar" }, ...bars));
    }
    const rows = present.map((part) => [
      element("span", {}, swatch(PARTS[part][0]), PARTS[part][1]), ...runs.map((run) => duration(run.goodput[part])),
    ]);
    nodes.push(table(["part", ...runs.map((run) => run.label)], rows));
    return nodes;
  }

  function attempts() {
    const rows = runs.flatMap((run) => run.attempts.map((attempt) => [
      named(run), attempt.number, attempt.ranks, attempt.steps ? attempt.steps.join("\u00a0to\u00a0") : "none",
      attempt.repeated, attempt.skipped, attempt.bad,
      attempt.status || (attempt === run.attempts.at(-1) ? "killed, or still running" : "killed"),
    ]));
    return [heading("Attempts"), table(["run", "attempt", "ranks", "steps", "repeated", "left out", "loss not finite", "ended"], rows)];
  }

  function ranks() {
    const nodes = [];
    for (const run of runs.filter((candidate) => candidate.ranks.length)) {
      const seconds = run.ranks.map((rank) => rank.own_s);
      const most = Math.max(...seconds) || 1;
      const middle = [...seconds].sort((a, b) => a - b)[(seconds.length - 1) >> 1];
      const slowest = [...run.ranks].sort((a, b) => b.own_s - a.own_s).slice(0, 32);
      const cells = slowest.sort((a, b) => a.rank - b.rank).flatMap((rank) => {
        const slow = rank.own_s > middle * 1.1 && rank.own_s - middle > 0.01 * (rank.step_s + rank.data_s);
        const more = middle ? ((rank.own_s / middle - 1) * 100).toFixed(0) : 0;
        const text = `${number(rank.own_s)} s of its own a step${slow ? `, ${more} % above the median` : ""}, ${number(rank.data_s)} s of it for data; waits ${number(rank.wait_s)} s for others`;
        return [
          element("span", { className: slow ? "slow" : "", textContent: `rank ${rank.rank}` }),
          element("div", { className: "bar" }, element("div", { style: { width: `${(rank.own_s / most) * 100}%`, background: slow ? "#e11d48" : color(run) } })),
          element("span", { className: slow ? "slow" : "quiet", textContent: text }),
        ];
      });
      const left = run.ranks.length - slowest.length;
      nodes.push(element("p", {}, named(run)), element("div", { className: "ranks" }, ...cells));
      if (left) nodes.push(element("p", { className: "quiet", textContent: `and ${left} faster ranks` }));
    }
    return nodes.length ? [heading("Ranks"), ...nodes] : [];
  }

  function pictures() {
    const nodes = [];
    for (const run of runs) {
      for (const name of new Set(run.pictures.map((picture) => picture.name))) {
        const figures = run.pictures.filter((picture) => picture.name === name).map((picture) => {
          const text = `step ${picture.step}${picture.caption ? `: ${picture.caption}` : ""}`;
          return element("figure", {},
            element("img", { src: picture.source, alt: `${name}, ${text}` }),
            element("figcaption", { className: "quiet", textContent: text }));
        });
        nodes.push(element("p", {}, named(run), `: ${name}`), element("div", { className: "pictures" }, ...figures));
      }
    }
    return nodes.length ? [heading("Pictures"), ...nodes] : [];
  }

  function tables() {
    const nodes = runs.flatMap((run) => run.tables.flatMap((logged) => {
      const left = logged.count - logged.rows.length;
      const text = `step ${logged.step}${left ? `, and ${left} more rows` : ""}`;
      return [
        element("p", {}, named(run), `: ${logged.name} `, element("span", { className: "quiet", textContent: text })),
        table(logged.columns, logged.rows),
      ];
    }));
    return nodes.length ? [heading("Tables"), ...nodes] : [];
  }

  function settings() {
    const all = runs.map((run) => bare({ ...run.config, ...run.environment }));
    const keys = [...new Set(all.flatMap(Object.keys))];
    const row = (key) => [key, ...all.map((values) => values[key] ?? "–")];
    const head = ["", ...runs.map((run) => run.label)];
    const differing = keys.filter((key) => all.some((values) => values[key] !== all[0][key]));
    const whole = table(head, keys.map(row));
    if (runs.length < 2) return [heading("Config"), whole];
    const text = "no setting of these runs differs";
    return [
      heading("What differs"),
      differing.length ? table(head, differing.map(row)) : element("p", { className: "quiet", textContent: text }),
      element("details", {}, element("summary", { textContent: "all settings" }), whole),
    ];
  }

  function events() {
    const rows = runs.flatMap((run) => [...run.marks].sort((a, b) => a.time - b.time).map((mark) => [
      named(run), `${markOf(mark.kind)[1]} ${mark.kind}`, mark.step, duration(mark.time), mark.text,
    ]));
    if (!rows.length) return [];
    return [element("details", {}, element("summary", { textContent: `all ${rows.length} marks` }), table(["run", "mark", "step", "after", ""], rows))];
  }

  // --- the page -----------------------------------------------------------------------------

  const names = [...facts.charts, ...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const charts = [...new Set(names)]
    .filter((title) => runs.some((run) => run.curves[title]))
    .map((title) => new Chart(title));
  const nodes = new Map(charts.map((chart) => [chart.node, chart]));
  let waiting = false;
  function redraw() {
    id("smoothed").textContent = id("smoothing").value;
    for (const chart of charts) chart.stale = true;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      charts.filter((chart) => chart.visible).forEach(drawStale);
    });
  }
  function drawStale(chart) {
    if (chart.stale) chart.draw();
    chart.stale = false;
  }

  id("written").textContent = `written ${facts.written}; drag over a curve to zoom in, double-click to zoom out`;
  for (const run of runs.length > 1 ? runs : []) {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => { box.checked ? shown.add(run) : shown.delete(run); redraw(); });
    id("runs").append(element("label", {}, box, " ", named(run)));
  }
  const kinds = [...new Set(runs.flatMap((run) => run.marks.map((mark) => mark.kind)))];
  id("key").append(...kinds.map((kind) => {
    const style = runs.length > 1 ? {} : { color: markOf(kind)[0] };
    return element("span", {}, element("span", { style: { ...style, margin: 0 }, textContent: markOf(kind)[1] }), ` ${kind} `);
  }));
  id("charts").append(...charts.map((chart) => chart.node));
  if (!charts.length) id("charts").append(element("p", { textContent: "No step has been written yet." }));
  id("sections").append(...goodput(), ...ranks(), ...pictures(), ...tables(), ...settings(), ...attempts(), ...events());
  for (const control of ["axis", "smoothing", "log", "clip", "marked"]) id(control).addEventListener("input", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // Only what is looked at is drawn: a run may have hundreds of metrics.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = nodes.get(entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible) drawStale(chart);
    }
  }, { rootMargin: "200px" });
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const chart = nodes.get(entry.target.parentNode);
      if (chart.plot) chart.plot.setSize({ width: chart.area.clientWidth, height: chart.area.clientHeight });
    }
  });
  redraw();
  for (const chart of charts) { seen.observe(chart.node); sized.observe(chart.area); }
})();
