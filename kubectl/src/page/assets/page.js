// Start, views, and the questions to the server.

import { address, el, name, number, span, visible } from "/dom.js";
import { Flows } from "/flows.js";
import { Identities } from "/identities.js";
import { Expiry, Nodes, Upgrades, expiring, troubled } from "/nodes.js";
import { Topology } from "/topology.js";

const byId = (id) => document.getElementById(id);
const EVERY = 5000;
const FOLLOWING = 2000;

/** The token comes in the address, leaves it at once, and stays in this tab for when it is loaded again. */
function takeToken() {
  const found = /^#token=([0-9a-f]{64})$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem("token", found[1]);
    history.replaceState(null, "", "/#topology");
  }
  return sessionStorage.getItem("token") ?? "";
}

const token = takeToken();

/** Asks the server. Answers that nobody waits for any more are dropped by `signal`. */
async function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  let answer;
  try {
    answer = await fetch(`/api/${path}?${query}`, { headers: { "x-nebula-page-token": token }, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("kubectl nebula page does not answer: has it ended?");
  }
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

const go = (view, parameters) => {
  location.hash = address(view, parameters);
};
const views = {
  topology: new Topology(ask, go),
  flows: new Flows(ask, go, () => refresh()),
  identities: new Identities(ask),
  nodes: new Nodes(ask),
  expiry: new Expiry(ask),
  upgrades: new Upgrades(ask),
};
let current = "topology";
let isPaused = false;
let timer;
let asking = new AbortController();
const latest = { nodes: { nodes: [] }, topology: { rows: [] } };

function route(isFirst) {
  const [view, query] = location.hash.slice(1).split("?");
  const previous = current;
  current = Object.hasOwn(views, view) ? view : "topology";
  for (const one of Object.keys(views)) byId(`view-${one}`).hidden = one !== current;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = byId(`h-${current}`);
  document.title = `${title.textContent} - Nebula`;
  if (!isFirst && previous !== current) {
    window.scrollTo(0, 0);
    title.focus({ preventScroll: true });
  }
  views[current].open(new URLSearchParams(query));
  refresh();
}

/** Shows what the current view is about, and the sums: each as soon as it is there. */
async function refresh() {
  clearTimeout(timer);
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  const view = views[current];
  const notes = { topology: [], nodes: [], view: [] };
  // Nodes are asked apart from flows: a team may not see them, and sees its flows.
  const show = async (part, answer) => {
    const shown = await answer;
    if (signal.aborted) return;
    if (part !== "view") latest[part] = shown;
    notes[part] = part === "view" ? shown : shown.notes;
    sums(latest.nodes, latest.topology);
  };
  const asked = await Promise.allSettled([
    show("view", view.refresh(signal)), show("nodes", ask("nodes", {}, signal)),
    show("topology", ask("topology", { since: "15m" }, signal)),
  ]);
  if (signal.aborted) return;
  const failed = asked.find((one) => one.status === "rejected");
  trouble(failed ? failed.reason.message : "");
  if (!failed) {
    const { scope } = latest.nodes;
    byId("scope").replaceChildren(...(scope ? ["namespace ", name(scope)] : ["all namespaces"]));
    byId("as-of").textContent = `As of ${new Date().toLocaleTimeString("en-GB")}`;
  }
  note([...new Set(Object.values(notes).flat())]);
  if (!isPaused && !document.hidden) timer = setTimeout(refresh, view.isFollowing ? FOLLOWING : EVERY);
}

function trouble(text) {
  const place = byId("trouble");
  // Said once, not with each failure.
  if (place.textContent !== visible(text)) place.textContent = visible(text);
  place.hidden = text === "";
}

function note(lines) {
  const place = byId("notes");
  const texts = lines.flatMap((line) => line.split("\n"));
  const isSame = texts.length === place.children.length
    && texts.every((text, at) => place.children[at].textContent === visible(text));
  if (!isSame) place.replaceChildren(...texts.map((text) => el("li", {}, text)));
}

function sums(nodes, topology) {
  const known = nodes.nodes.filter((one) => one.status);
  const ready = known.filter((one) => one.status.is_ready).length;
  const troubles = nodes.nodes.filter((one) => troubled(one, nodes)).length;
  const unprotected = known.reduce((sum, one) => sum + one.status.pods.unprotected, 0);
  const protecteds = known.reduce((sum, one) => sum + one.status.pods.protected, 0);
  const refused = topology.rows.reduce((sum, row) => sum + row.refused, 0);
  const [first] = expiring(nodes);
  const left = first ? first.left : undefined;
  const upgrades = known.filter(({ status: { upgrade } }) => upgrade.outdated > 0 || upgrade.failed.length > 0
    || upgrade.paused).length;
  const tiles = [
    ["Nodes ready", `${number(ready)} of ${number(nodes.nodes.length)}`, address("nodes"), ready < nodes.nodes.length],
    ["Nodes with trouble", number(troubles), address("nodes", { trouble: "1" }), troubles > 0],
    ["Pods unprotected", `${number(unprotected)} of ${number(protecteds + unprotected)}`,
      address("nodes", { trouble: "1" }), unprotected > 0],
    ["Refusals in 15 min", number(refused), address("flows", { verdict: "refused", since: "15m" }), refused > 0],
    ["First certificate", left === undefined ? "-" : left <= 0 ? "expired" : `for ${span(left)}`,
      address("expiry"), Boolean(first && (left <= 0 || first.isLate))],
    ["Nodes in upgrade", number(upgrades), address("upgrades"), false],
  ];
  const place = byId("sums");
  while (place.children.length < tiles.length) {
    place.append(el("li", {}, el("a", { href: "#" }, el("b"), el("span"))));
  }
  tiles.forEach(([title, value, link, isTrouble], at) => {
    const tile = place.children[at].firstChild;
    tile.setAttribute("href", link);
    tile.classList.toggle("late", isTrouble);
    tile.children[0].textContent = isTrouble ? `! ${value}` : value;
    tile.children[1].textContent = title;
  });
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("content").focus();
});
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) clearTimeout(timer);
  else refresh();
});
window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) location.reload();
  else route(false);
});
// A tab that nobody looks at asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!isPaused) refresh();
});
route(true);
