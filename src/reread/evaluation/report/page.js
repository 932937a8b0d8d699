(() => {
  "use strict";
  const reading = (id) => JSON.parse(document.getElementById(id).textContent);
  const charts = reading("charts");
  const root = document.documentElement;
  const hidden = new Set();

  // "var(--ink)" as the colour it is now, everywhere in a value
  const coloured = (value, styles) => {
    if (typeof value === "string") {
      const found = /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return found ? styles.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "number" ? value : value.map((entry) => coloured(entry, styles));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([key, entry]) => [key, coloured(entry, styles)]));
    }
    return value;
  };

  const layoutOf = (chart, styles) => {
    const layout = coloured(chart.layout, styles);
    for (const [key, axis] of Object.entries(layout)) {
      if (/^[xy]axis/.test(key)) {
        layout[key] = {
          gridcolor: styles.getPropertyValue("--rule").trim(),
          zerolinecolor: styles.getPropertyValue("--rule-strong").trim(),
          linecolor: styles.getPropertyValue("--rule-strong").trim(),
          fixedrange: true, ...axis,
        };
      }
    }
    return {
      height: chart.height, margin: { l: 8, r: 12, t: 14, b: 8 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: styles.getPropertyValue("--data").trim(), size: 12,
              color: styles.getPropertyValue("--soft").trim() },
      hoverlabel: { align: "left", bgcolor: styles.getPropertyValue("--panel").trim(),
                    bordercolor: styles.getPropertyValue("--rule-strong").trim(),
                    font: { color: styles.getPropertyValue("--ink").trim(), size: 12 } },
      ...layout,
    };
  };

  // what a cell of a heat map says; z is log10 of its mass
  const hovered = (cells, z) => z.map((row, step) => row.map((value, at) => {
    const kept = cells.kept[step][at];
    const found = [`<b>step ${step}</b> ${cells.steps[step]}`, `keys from ${cells.starts[at]}`];
    if (value !== null) {
      const percent = value <= -4 ? "0.01 or less" : (100 * 10 ** value).toPrecision(3);
      found.push(`mass ${percent} %`);
    }
    if (kept !== null) { found.push(`${kept} % of the keys read`); }
    return found.join("<br>");
  }));
  for (const chart of charts) {
    for (const trace of chart.data) {
      if (trace.type === "heatmap") { trace.text = hovered(chart.cells, trace.z); }
    }
  }

  const draw = (chart) => {
    const place = document.getElementById(chart.name);
    const styles = getComputedStyle(root);
    const data = coloured(chart.data, styles).map((trace) => ({
      ...trace, visible: trace.meta === undefined || !hidden.has(trace.meta),
    }));
    return Plotly.react(place, data, layoutOf(chart, styles),
      { displayModeBar: false, responsive: true });
  };
  const drawAll = () => Promise.all(charts.map(draw));
  const withMethods = charts.filter((chart) => chart.data.some((t) => t.meta !== undefined));

  drawAll().then(() => { root.dataset.drawn = "yes"; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; drawAll(); });
  addEventListener("afterprint", () => { delete root.dataset.theme; drawAll(); });

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const number = Number(button.dataset.method);
      const shown = hidden.delete(number);
      if (!shown) { hidden.add(number); }
      for (const same of document.querySelectorAll(`.legend [data-method="${number}"]`)) {
        same.setAttribute("aria-pressed", String(shown));
      }
      withMethods.forEach(draw);
    });
  }

  const wide = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      target.toggleAttribute("data-wide", target.scrollWidth > target.clientWidth + 1);
    }
  });
  for (const place of document.querySelectorAll(".scroll")) { wide.observe(place); }

  const sortBy = (table, column, up) => {
    for (const body of table.tBodies) {
      const value = (row) => {
        const text = row.cells[column].dataset.sort;
        return text === undefined ? null : Number(text);
      };
      const rows = [...body.rows];
      rows.sort((a, b) => {
        const [one, other] = [value(a), value(b)];
        if (one === null || other === null) { return (one === null) - (other === null); }
        return up ? one - other : other - one;
      });
      body.append(...rows);
    }
  };
  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.cells) { other.removeAttribute("aria-sort"); }
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      sortBy(head.closest("table"), head.cellIndex, up);
    });
  }

  const button = document.getElementById("download");
  button.addEventListener("click", () => {
    const text = document.getElementById("sums").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "reread-report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
