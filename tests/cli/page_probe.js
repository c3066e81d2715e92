// Uses the page of `top --web` as a person would, and leaves what it saw in an element "result" (test_web.py).
(async () => {
  const until = async (what) => { while (!what()) await new Promise((done) => setTimeout(done, 50)); };
  const prompts = () => $("facts").textContent.match(/prompts through it: (\d+)/)[1];
  const buttons = () => [...document.querySelectorAll("#icicle button")];
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const id = () => +document.activeElement.dataset.node;
  const out = {};

  // A node's text, and what changes while the server works.
  const first = () => buttons().find((button) => button.dataset.node && !nodes.get(+button.dataset.node).start);
  await until(() => nodes && first());
  first().click();
  await until(() => !$("text").hidden);
  Object.assign(out, { first: prompts(), words: $("text").textContent, shades: [...$("text").children].map((span) => +span.style.opacity) });
  await until(() => prompts() !== out.first && !$("history").hidden && samples.at(-1).prompt_tokens > samples[0].prompt_tokens);
  Object.assign(out, { later: prompts(), silent: $("silent").hidden, found: $("found-text").textContent });
  out.history = $("history").getAttribute("aria-label");

  // Search: a text that begins in the first node of the document and ends behind it.
  const words = Array.from({ length: 60 }, (_, i) => `<w${(i * 7) % 11}>`);
  $("search").value = words.slice(5, 24).join(" ").toUpperCase();
  $("search").dispatchEvent(new Event("input"));
  await until(() => hits.size);
  out.marked = buttons().filter((button) => button.classList.contains("found")).map((button) => nodes.get(+button.dataset.node).start);
  $("search").value = "";
  await search();

  // Keys: to the child and back, zoomed and not.
  first().focus();
  const start = id();
  press("ArrowRight");
  const right = nodes.get(id()).parent;
  press("ArrowLeft");
  press("z");
  out.keys = [right === start, id() === start, root === start];
  press("Escape");
  press("/");
  out.keys.push(root === 0, document.activeElement === $("search"));
  $("search").blur();

  // One large document beside 200 small nodes: each that is shown can be read, the others are folded.
  const like = { ...data.nodes[0], parent: 0, start: 0 };
  const small = Array.from({ length: 200 }, (_, i) => ({ ...like, id: 10001 + i, tokens: 100, slots: 20, bytes: 1e5 }));
  show({ ...data, nodes: [{ ...like, id: 10000, tokens: 32768, slots: 6554, bytes: 4e8 }, ...small] });
  const least = () => [Math.min(...buttons().map((button) => button.offsetHeight)), Math.min(...buttons().map((button) => button.offsetWidth))];
  out.folded = [document.querySelector(".more").textContent.split(",")[0], buttons().length, ...least()];
  document.querySelector(".more").click();
  out.unfolded = [buttons().length, ...least()];
  out.sideways = document.documentElement.scrollWidth > innerWidth;

  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(out);
  document.body.append(result);
})();
