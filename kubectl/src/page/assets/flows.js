// Flow records: conditions, one page after another, and what comes.

import { Table, address, ago, bytes, el, name, number, span } from "/dom.js";

const FIELDS = ["namespace", "pod", "peer", "port", "verdict", "since"];
const PROTOCOLS = { 1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp" };
const VERDICTS = { allowed: "✓ allowed", audit: "! audit", refused: "✗ refused" };

export class Flows {
  isFollowing = false;
  #ask;
  #go;
  #renew;
  #parameters = {};
  /** The places at which the pages up to this one begin. */
  #pages = [""];
  #next = "";
  #isStale = true;
  #now = 0;
  #table;
  #tools = document.getElementById("flows-tools");

  constructor(ask, go, renew) {
    this.#ask = ask;
    this.#go = go;
    this.#renew = renew;
    this.#table = new Table(document.getElementById("flows-table"), {
      caption: "Flow records, the newest first",
      key: (record) => `${record.node} ${record[own(record)]?.pod ?? ""} ${record.id}`,
      empty: "No record meets these conditions.",
      rowClass: (record) => (record.verdict === "allowed" ? "" : record.verdict),
      columns: [
        { title: "Seen", cell: (record) => ago(record.last_ms, this.#now) },
        { title: "Verdict", cell: verdict },
        { title: "From", cell: (record) => end(record.source) },
        { title: "To", cell: (record) => [end(record.destination), service(record)] },
        { title: "Port", isNumber: true, cell: port },
        { title: "Sent", isNumber: true, cell: (record) => bytes(record.forward.bytes) },
        { title: "Back", isNumber: true, cell: (record) => bytes(record.reply.bytes) },
        { title: "By", cell: cause },
        { title: "Recorded", cell: recorded },
      ],
    });
    this.#tools.addEventListener("submit", (event) => {
      event.preventDefault();
      const { from, to } = this.#parameters;
      this.#go("flows", { ...this.#fields(), from, to });
    });
    this.#tools.addEventListener("reset", (event) => {
      event.preventDefault();
      this.#go("flows");
      for (const field of FIELDS) this.#tools.elements[field].value = "";
    });
    const follow = document.getElementById("follow");
    follow.addEventListener("click", () => {
      this.isFollowing = !this.isFollowing;
      follow.setAttribute("aria-pressed", String(this.isFollowing));
      this.#turn([""]);
    });
    document.getElementById("pager").addEventListener("click", ({ target }) => {
      const { to } = target.dataset;
      if (to === "first") this.#turn([""]);
      if (to === "newer" && this.#pages.length > 1) this.#turn(this.#pages.slice(0, -1));
      if (to === "older" && this.#next) this.#turn([...this.#pages, this.#next]);
    });
  }

  #fields() {
    return Object.fromEntries(FIELDS.map((field) => [field, this.#tools.elements[field].value.trim()]));
  }

  #turn(pages) {
    this.#pages = pages;
    this.#isStale = true;
    this.#renew();
  }

  open(parameters) {
    this.#parameters = Object.fromEntries([...FIELDS, "from", "to"].map((key) => [key, parameters.get(key) ?? ""]));
    for (const field of FIELDS) this.#tools.elements[field].value = this.#parameters[field];
    const { from, to } = this.#parameters;
    const between = document.getElementById("flows-between");
    between.hidden = !from && !to;
    const named = (party) => name(party.replace(/^unnamed\/$/, "unnamed addresses"));
    const side = (word, party) => (party ? [`${word} `, named(party), " "] : []);
    const rest = { ...this.#parameters, from: "", to: "" };
    between.replaceChildren("Only flows ", ...side("from", from), ...side("to", to),
      el("a", { href: address("flows", rest) }, "Show all"));
    this.#pages = [""];
    this.#isStale = true;
  }

  async refresh(signal) {
    // What is read stays, unless it is followed.
    if (!this.isFollowing && !this.#isStale) return this.#notes ?? [];
    const before = this.#pages.at(-1);
    const answer = await this.#ask("flows", { ...this.#parameters, before }, signal);
    this.#isStale = false;
    this.#now = answer.now_ms;
    this.#next = answer.next ?? "";
    this.#table.show(answer.records);
    for (const button of document.querySelectorAll("#pager button")) {
      const { to } = button.dataset;
      // One that is focused stays where it is and does nothing.
      button.setAttribute("aria-disabled", String(to === "older" ? !this.#next : to === "newer" && !before));
    }
    const page = this.#pages.length;
    const count = `${number(answer.records.length)} records of ${number(answer.held)} that are held`;
    this.#notes = [`Page ${number(page)}: ${count}.`, ...answer.notes];
    return this.#notes;
  }

  #notes;
}

/** The end that wrote the record. */
function own(record) {
  return record.direction === "outbound" ? "source" : "destination";
}

function verdict(record) {
  const isKnown = Object.hasOwn(VERDICTS, record.verdict);
  const reason = record.reason ? [": ", name(record.reason)] : [];
  const attributes = { class: `verdict ${isKnown ? record.verdict : ""}` };
  return el("span", attributes, isKnown ? VERDICTS[record.verdict] : record.verdict, reason);
}

function end(one) {
  const known = one.pod ?? one.name;
  const at = one.address ? el("small", {}, name(one.address)) : null;
  if (known === undefined) return at ?? "-";
  const link = el("a", { href: address("flows", one.pod ? { pod: known } : { peer: known }) }, name(known));
  return [link, at ? " " : null, at];
}

function service(record) {
  return record.original ? [" ", el("small", {}, "as ", name(record.original.destination))] : null;
}

function port(record) {
  const protocol = PROTOCOLS[record.protocol] ?? record.protocol;
  return record.destination.port === undefined ? protocol : `${record.destination.port}/${protocol}`;
}

/** The rule or policy that decided. */
function cause(record) {
  const parts = [];
  if (record.rule !== undefined) parts.push(name(`firewall.${record.direction}[${record.rule}]`));
  const { policy } = record;
  if (policy) {
    const rule = policy.rule === undefined ? "" : ` rule ${policy.rule}`;
    const tier = policy.tier ? `${policy.tier} ` : "";
    parts.push(name(policy.policy ? `${tier}${policy.policy}${rule}` : policy.reason));
  }
  return parts.length ? parts.flatMap((part, at) => (at ? [", ", part] : [part])) : "-";
}

function recorded(record) {
  const lasted = span(Math.max(0, (record.last_ms - record.started_ms) / 1000));
  const way = record.path === "relay" ? ["relay ", name(record.relay ?? "")] : [record.path ?? "no tunnel"];
  const title = `${record.event}${record.end ? ` (${record.end})` : ""}, lasted ${lasted}`;
  return el("span", {}, name(record.node), ` ${record.direction} `, el("small", {}, ...way, `, ${title}`));
}
