// Who speaks with whom, and who is refused: a picture of the busiest, and a table of all.

import { Table, address, ago, bytes, el, name, number, svg, visible } from "/dom.js";

export class Topology {
  #ask;
  #go;
  #answer = { rows: [], now_ms: 0, left_out: 0 };
  #party = "";
  #table;
  #tools = document.getElementById("topology-tools");
  #diagram = document.getElementById("diagram");

  constructor(ask, go) {
    this.#ask = ask;
    this.#go = go;
    const link = (party) => el("a", { href: address("topology", { party: text(party) }) }, label(party));
    this.#table = new Table(document.getElementById("topology-table"), {
      caption: "Flows by source and destination",
      key: (row) => `${text(row.from)} ${text(row.to)}`,
      empty: "No flow is known between any two.",
      rowClass: (row) => (row.refused ? "refused" : ""),
      columns: [
        { title: "From", cell: (row) => link(row.from), value: (row) => row.from.name },
        { title: "To", cell: (row) => link(row.to), value: (row) => row.to.name },
        { title: "Flows", isNumber: true, cell: (row) => number(row.flows), value: (row) => row.flows },
        { title: "Traffic", isNumber: true, cell: (row) => bytes(row.bytes), value: (row) => row.bytes },
        { title: "Refused", isNumber: true, value: (row) => row.refused, cell: (row) => refusals(row) },
        { title: "In audit", isNumber: true, cell: (row) => number(row.audit), value: (row) => row.audit },
        { title: "Last seen", cell: (row) => ago(row.last_ms, this.#answer.now_ms), value: (row) => -row.last_ms },
        {
          title: "Records",
          cell: (row) => el("a", {
            href: address("flows", { from: text(row.from), to: text(row.to) }),
            "aria-label": `Flows from ${row.from.name || "unnamed"} to ${row.to.name || "unnamed"}`,
          }, "flows"),
        },
      ],
    });
    this.#tools.addEventListener("submit", (event) => event.preventDefault());
    this.#tools.addEventListener("input", (event) => {
      if (event.target.name === "since") this.#go("topology", this.#parameters());
      else this.#draw();
    });
    for (const [type, isOn] of [["focusin", true], ["focusout", false], ["mouseover", true], ["mouseout", false]]) {
      this.#diagram.addEventListener(type, ({ target }) => mark(this.#diagram, isOn ? target.closest("a") : null));
    }
    new ResizeObserver(() => this.#draw()).observe(this.#diagram);
  }

  #parameters() {
    const since = this.#tools.elements.since.value;
    return { party: this.#party, since: since === "15m" ? "" : since || "all" };
  }

  open(parameters) {
    const since = parameters.get("since") ?? "15m";
    this.#tools.elements.since.value = since === "all" ? "" : since;
    this.#party = parameters.get("party") ?? "";
  }

  async refresh(signal) {
    this.#answer = await this.#ask("topology", { since: this.#tools.elements.since.value }, signal);
    this.#draw();
    const { left_out: leftOut } = this.#answer;
    return leftOut ? [`${number(leftOut)} pairs with less traffic are left out.`] : [];
  }

  #draw() {
    const { q, refused } = this.#tools.elements;
    const wanted = q.value.trim().toLowerCase();
    const has = (party) => (party.name || "unnamed").toLowerCase().includes(wanted);
    const rows = this.#answer.rows.filter((row) => (!refused.checked || row.refused)
      && (!this.#party || [text(row.from), text(row.to)].includes(this.#party))
      && (!wanted || has(row.from) || has(row.to)));
    this.#table.show(rows);
    const place = document.getElementById("topology-party");
    place.hidden = !this.#party;
    const all = el("a", { href: address("topology") }, "Show all");
    place.replaceChildren("Only from and to ", name(this.#party.split("/").slice(1).join("/") || "unnamed"), ". ", all);
    const focused = this.#diagram.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const width = this.#diagram.clientWidth;
    this.#diagram.replaceChildren(...(rows.length && width ? picture(rows, width) : []));
    if (focused) {
      for (const link of this.#diagram.querySelectorAll("a")) {
        if (link.dataset.key === focused) link.focus({ preventScroll: true });
      }
    }
  }
}

/** As the server names one in a query. */
export const text = (party) => `${party.kind}/${party.name}`;

const KINDS = { namespace: "", host: "host ", unnamed: "" };

export function label(party) {
  return [KINDS[party.kind], name(party.name || "unnamed addresses")];
}

export function refusals(row) {
  if (!row.refused) return "0";
  const packets = `${number(row.refused_packets)} packets`;
  return el("strong", { class: "bad", title: packets }, `✗ ${number(row.refused)}`);
}

/** The lines of one box stand out; without one all do. */
function mark(diagram, box) {
  for (const line of diagram.querySelectorAll("path")) {
    line.classList.toggle("aside", Boolean(box) && !line.dataset.ends.split("\n").includes(box.dataset.key));
  }
}

/** Sources on the left, destinations on the right, and between them what flows and what is refused. */
function picture(rows, width) {
  const [left, right] = [column(rows, "from"), column(rows, "to")];
  const wide = Math.min(240, Math.floor(width * 0.34));
  const height = Math.max(left.length, right.length) * ROW + 8;
  const ribbons = new Map();
  for (const row of rows) {
    const ends = [place(left, row.from), place(right, row.to)];
    const ribbon = ribbons.get(ends.join()) ?? { ends, bytes: 0, refused: 0 };
    ribbon.bytes += row.bytes;
    ribbon.refused += row.refused;
    ribbons.set(ends.join(), ribbon);
  }
  const middle = (at) => at * ROW + ROW / 2 + 4;
  const sorted = [...ribbons.values()].sort((a, b) => a.refused - b.refused);
  const lines = sorted.flatMap(({ ends, bytes: count, refused }) => {
    const [y1, y2] = ends.map(middle);
    const [x1, x2] = [wide, width - wide];
    const bend = (x2 - x1) / 2;
    const keys = `from ${text(left[ends[0]])}\nto ${text(right[ends[1]])}`;
    const rest = left[ends[0]].rest || right[ends[1]].rest ? " rest" : "";
    const d = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
    const thick = count ? Math.min(9, 1 + Math.log10(1 + count / 1024)) : 0;
    return [
      thick ? svg("path", { d, class: `traffic${rest}`, "data-ends": keys, "stroke-width": thick.toFixed(1) }) : null,
      refused ? svg("path", { d, class: `refusal${rest}`, "data-ends": keys, "stroke-width": 2 }) : null,
    ];
  });
  const box = (party, at, x) => {
    const chars = Math.max(6, Math.floor((wide - 18) / 7.4));
    const title = visible(party.rest ? `${number(party.rest)} more` : party.name || "unnamed");
    const short = title.length > chars ? `${title.slice(0, chars - 1)}…` : title;
    const sums = `${number(party.flows)} flows, ${bytes(party.bytes)}, ${number(party.refused)} refused`;
    const frame = (inset) => svg("rect", {
      x: x + 1 + inset,
      y: at * ROW + 8 + inset,
      width: wide - 2 - 2 * inset,
      height: ROW - 8 - 2 * inset,
      rx: 6 - inset,
    });
    const parts = [
      svg("title", {}, `${title}: ${sums}`),
      frame(0),
      party.kind === "host" ? frame(3) : null,
      svg("text", { x: x + 9, y: middle(at) + 4.5 }, short),
    ];
    const kind = `${party.kind}${party.refused ? " refused" : ""}`;
    if (party.rest) return svg("g", { class: `box ${kind}` }, parts);
    return svg("a", {
      href: address("topology", { party: text(party) }),
      class: `box ${kind}`,
      "aria-label": `${KINDS[party.kind]}${title}, ${x ? "destination" : "source"}: ${sums}`,
      "data-key": `${x ? "to" : "from"} ${text(party)}`,
    }, parts);
  };
  const boxes = [
    ...left.map((party, at) => box(party, at, 0)), ...right.map((party, at) => box(party, at, width - wide)),
  ];
  const attributes = {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Sources and destinations",
  };
  const legend = el("figcaption", {},
    "From the left to the right. Width: traffic. ", el("span", { class: "bad" }, "Dashed: refused."),
    " Double frame: a host outside the cluster.");
  return [svg("svg", attributes, svg("g", { "aria-hidden": "true" }, lines.filter(Boolean)), boxes), legend];
}

/** The busiest of one side, and one place for all others. */
function column(rows, side) {
  const sums = new Map();
  for (const row of rows) {
    const sum = sums.get(text(row[side])) ?? { ...row[side], flows: 0, bytes: 0, refused: 0 };
    sum.flows += row.flows;
    sum.bytes += row.bytes;
    sum.refused += row.refused;
    sums.set(text(row[side]), sum);
  }
  const all = [...sums.values()].sort((a, b) => b.refused - a.refused || b.bytes - a.bytes);
  if (all.length <= BOXES) return all;
  const rest = all.splice(BOXES - 1);
  const sum = (key) => rest.reduce((total, one) => total + one[key], 0);
  const [flows, bytesOfRest, refused] = ["flows", "bytes", "refused"].map(sum);
  return [...all, { kind: "rest", name: "", rest: rest.length, flows, bytes: bytesOfRest, refused }];
}

function place(all, party) {
  const at = all.findIndex((one) => text(one) === text(party));
  return at < 0 ? all.length - 1 : at;
}

const ROW = 34;
const BOXES = 12;
