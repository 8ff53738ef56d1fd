// How nodes stand, which certificates expire first, and upgrades.

import { Table, el, name, number, span } from "/dom.js";

/** In seconds, how long before its end a certificate should have been renewed: an hour, or a quarter of its life. */
const warningTime = (notBefore, notAfter) => Math.max(0, Math.min(3600, (notAfter - notBefore) / 4));

/** Whether something of a node is not as it should be. */
export function troubled(row, answer) {
  const { status } = row;
  if (!status) return true;
  const first = status.first_to_expire;
  return !status.is_ready || status.pods.unprotected > 0 || status.parts.some((part) => !part.ok)
    || hasFailed(status.upgrade) || Boolean(first && first.not_after * 1000 - answer.now_ms <= 0);
}

/** Upgrades that an operator paused have not failed. */
function hasFailed(upgrade) {
  return upgrade.failed.length > 0 || Boolean(upgrade.paused && !upgrade.paused.by_operator);
}

/** The first certificate to expire of each node, with the seconds that it has left. */
export function expiring(answer) {
  const all = answer.nodes.flatMap(({ node, status }) => {
    const { pod, not_before: notBefore = 0, not_after: notAfter } = status?.first_to_expire ?? {};
    if (notAfter === undefined) return [];
    const left = notAfter - answer.now_ms / 1000;
    return [{ node, pod, notAfter, left, isLate: left < warningTime(notBefore, notAfter) }];
  });
  return all.sort((a, b) => a.left - b.left);
}

/** The CAs trusted in the network, with the nodes that know each. A successor should be there a month before. */
function trustedCas(answer) {
  const cas = new Map();
  for (const { node, status } of answer.nodes) {
    for (const { name: title, fingerprint, not_after: notAfter } of status?.cas ?? []) {
      const left = notAfter - answer.now_ms / 1000;
      const isLate = left < 30 * 86400;
      const known = cas.get(fingerprint) ?? { title, fingerprint, notAfter, left, isLate, nodes: [] };
      cas.set(fingerprint, known);
      known.nodes.push(node);
    }
  }
  return [...cas.values()].sort((a, b) => a.left - b.left);
}

const expires = ({ left, isLate }) => {
  if (left <= 0) return el("strong", { class: "bad" }, "✗ expired");
  return isLate ? el("strong", { class: "late" }, `! in ${span(left)}`) : `in ${span(left)}`;
};

export class Nodes {
  #ask;
  #answer = { nodes: [] };
  #table;
  #tools = document.getElementById("nodes-tools");

  constructor(ask) {
    this.#ask = ask;
    const count = (title, key, isBad) => ({
      title,
      isNumber: true,
      value: (row) => row.status?.pods[key] ?? -1,
      cell: (row) => {
        const value = row.status?.pods[key];
        if (value === undefined) return "-";
        return isBad && value > 0 ? el("strong", { class: "bad" }, `✗ ${number(value)}`) : number(value);
      },
    });
    this.#table = new Table(document.getElementById("nodes-table"), {
      caption: "Nodes and their parts",
      key: (row) => row.node,
      empty: "No node matches.",
      rowClass: (row) => (troubled(row, this.#answer) ? "late" : ""),
      columns: [
        { title: "Node", value: (row) => row.node, cell: (row) => name(row.node) },
        { title: "Agent", value: (row) => row.status?.version ?? "", cell: (row) => name(row.status?.version || "-") },
        { title: "Ready", value: (row) => (row.status ? Number(row.status.is_ready) : -1), cell: ready },
        count("Protected", "protected", false),
        count("Unprotected", "unprotected", true),
        count("Closed", "closed", false),
        { title: "Parts", value: (row) => -(row.status?.parts.filter((part) => !part.ok).length ?? 99), cell: parts },
        { title: "Upgrade", value: stage, cell: (row) => name(stage(row)) },
      ],
    });
    this.#tools.addEventListener("submit", (event) => event.preventDefault());
    this.#tools.addEventListener("input", () => this.#draw());
  }

  open(parameters) {
    if (parameters.has("trouble")) this.#tools.elements.trouble.checked = true;
  }

  async refresh(signal) {
    this.#answer = await this.#ask("nodes", {}, signal);
    this.#draw();
    return [];
  }

  #draw() {
    const { q, trouble } = this.#tools.elements;
    const wanted = q.value.trim().toLowerCase();
    const texts = (row) => (row.status?.parts ?? []).flatMap((part) => [part.name, part.reason]);
    const has = (row) => [row.node, row.error ?? "", ...texts(row)].some((text) => text.toLowerCase().includes(wanted));
    const isTroubled = (row) => Number(troubled(row, this.#answer));
    const rows = this.#answer.nodes.filter((row) => has(row) && (!trouble.checked || isTroubled(row)));
    // Trouble comes first, unless a head was chosen.
    this.#table.show(rows.sort((a, b) => isTroubled(b) - isTroubled(a)));
  }
}

const stage = (row) => row.status?.upgrade.stage ?? "";

function ready({ status }) {
  if (!status) return el("strong", { class: "bad" }, "✗ no answer");
  return status.is_ready ? "✓ yes" : el("strong", { class: "bad" }, "✗ no");
}

/** What is wrong is there at once, and what is well unfolds. */
function parts({ status, error }) {
  if (!status) return name(error);
  const line = (part) => {
    const [sign, mark] = part.ok ? ["✓", ""] : part.is_required ? ["✗", "bad"] : ["!", "late"];
    const advice = part.advice && !part.ok ? el("div", { class: "advice" }, name(part.advice)) : null;
    return el("li", {}, el("strong", { class: mark }, `${sign} `, name(part.name)), " ", name(part.reason), advice);
  };
  const wrong = status.parts.filter((part) => !part.ok);
  const well = status.parts.filter((part) => part.ok);
  const list = (some) => el("ul", { class: "parts" }, some.map(line));
  return [
    wrong.length ? list(wrong) : null,
    well.length ? el("details", {}, el("summary", {}, `${number(well.length)} as they should be`), list(well)) : null,
  ];
}

export class Expiry {
  #ask;
  #table;
  #cas;

  constructor(ask) {
    this.#ask = ask;
    this.#cas = new Table(document.getElementById("cas-table"), {
      caption: "CAs that the network trusts",
      key: (row) => row.fingerprint,
      empty: "No agent knows them: it asks the CA for them, and agents of earlier releases do not.",
      rowClass: (row) => (row.left <= 0 || row.isLate ? "late" : ""),
      columns: [
        { title: "Expires", value: (row) => row.left, cell: expires },
        { title: "CA", value: (row) => row.title, cell: (row) => name(row.title) },
        { title: "Fingerprint", value: (row) => row.fingerprint, cell: (row) => name(row.fingerprint.slice(0, 12)) },
        { title: "Valid until", value: (row) => row.notAfter, cell: (row) => stamp(row.notAfter) },
        { title: "Nodes", isNumber: true, value: (row) => row.nodes.length, cell: (row) => number(row.nodes.length) },
      ],
    });
    this.#table = new Table(document.getElementById("expiry-table"), {
      caption: "The first certificate to expire of each node",
      key: (row) => row.node,
      empty: "No certificate of a pod is known.",
      rowClass: (row) => (row.left <= 0 || row.isLate ? "late" : ""),
      columns: [
        { title: "Expires", value: (row) => row.left, cell: expires },
        { title: "Pod", value: (row) => row.pod, cell: (row) => name(row.pod) },
        { title: "Node", value: (row) => row.node, cell: (row) => name(row.node) },
        { title: "Valid until", value: (row) => row.notAfter, cell: (row) => stamp(row.notAfter) },
      ],
    });
  }

  open() {}

  async refresh(signal) {
    const answer = await this.#ask("nodes", {}, signal);
    this.#cas.show(trustedCas(answer));
    this.#table.show(expiring(answer));
    return [];
  }
}

function stamp(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "-" : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

export class Upgrades {
  #ask;
  #table;
  #failed;

  constructor(ask) {
    this.#ask = ask;
    const count = (title, value) => ({ title, isNumber: true, value, cell: (row) => number(value(row)) });
    this.#table = new Table(document.getElementById("upgrades-table"), {
      caption: "How far the installed program is on each node",
      key: (row) => row.node,
      empty: "No node has answered.",
      rowClass: ({ upgrade }) => (hasFailed(upgrade) ? "late" : ""),
      columns: [
        { title: "Node", value: (row) => row.node, cell: (row) => name(row.node) },
        { title: "Stage", value: (row) => row.upgrade.stage, cell: (row) => name(row.upgrade.stage) },
        count("Instances", (row) => row.upgrade.instances),
        count("Outdated", (row) => row.upgrade.outdated),
        count("Upgraded", (row) => row.upgrade.upgraded),
        count("Rolled back", (row) => row.upgrade.rolled_back),
        { title: "Under way", cell: ({ upgrade }) => underWay(upgrade.under_way) },
        { title: "Program", value: (row) => row.upgrade.program ?? "", cell: ({ upgrade }) => program(upgrade) },
        { title: "Why", cell: (row) => name(row.upgrade.why) },
      ],
    });
    this.#failed = new Table(document.getElementById("failed-table"), {
      caption: "Instances that do not get the program",
      key: (row) => `${row.node} ${row.pod}`,
      empty: "No upgrade has failed.",
      rowClass: () => "late",
      columns: [
        { title: "Pod", value: (row) => row.pod, cell: (row) => name(row.pod) },
        { title: "Node", value: (row) => row.node, cell: (row) => name(row.node) },
        { title: "Outcome", value: (row) => row.outcome, cell: (row) => name(row.outcome.replaceAll("_", " ")) },
        { title: "Why", cell: (row) => name(row.why) },
      ],
    });
  }

  open() {}

  async refresh(signal) {
    const { nodes } = await this.#ask("nodes", {}, signal);
    const known = nodes.filter((row) => row.status).map(({ node, status }) => ({ node, upgrade: status.upgrade }));
    // What is under way comes first.
    const isBusy = ({ upgrade: { outdated, under_way: busy, paused } }) =>
      Number(outdated > 0 || busy.length > 0 || Boolean(paused));
    this.#table.show(known.sort((a, b) => isBusy(b) - isBusy(a)));
    this.#failed.show(known.flatMap(({ node, upgrade }) => upgrade.failed.map((one) => ({ node, ...one }))));
    return [];
  }
}

function underWay(pods) {
  const shown = pods.slice(0, 3).flatMap((pod, at) => (at ? [", ", name(pod)] : [name(pod)]));
  return pods.length > 3 ? [...shown, ` and ${number(pods.length - 3)} more`] : shown.length ? shown : "-";
}

/** Enough digits to tell programs apart, and the version. */
function program(upgrade) {
  if (!upgrade.program) return "not known yet";
  return name(`${upgrade.program.slice(0, 12)}${upgrade.version ? `, version ${upgrade.version}` : ""}`);
}
