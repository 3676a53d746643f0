// Hover details, and the switch between light and dark. Marks carry data-t ("title|line|line"), or data-p ("kind|
// micro-batch|stage|start") where what is said of all passes of a stage stands once at their picture.
const root = document.documentElement
const tip = document.getElementById("tip")

function paint(dark) {
  root.dataset.theme = dark ? "dark" : "light"
  const button = document.getElementById("theme")
  button.textContent = dark ? "Light" : "Dark"
  button.setAttribute("aria-label", dark ? "switch to light colours" : "switch to dark colours")
}

const system = matchMedia("(prefers-color-scheme: dark)")
paint(system.matches)
system.addEventListener("change", event => paint(event.matches))
document.getElementById("theme").addEventListener("click", () => paint(root.dataset.theme !== "dark"))
addEventListener("beforeprint", () => { root.dataset.was = root.dataset.theme; paint(false) })
addEventListener("afterprint", () => paint(root.dataset.was === "dark"))

function told(mark) {
  if (mark.dataset.t) return mark.dataset.t.split("|")
  const [kind, microbatch, stage, start] = mark.dataset.p.split("|")
  const picture = mark.closest("svg")
  picture.passes ??= JSON.parse(picture.dataset.passes)
  const passes = picture.passes[kind]
  return [`${passes.name[0]}, micro-batch ${microbatch}`, `stage ${stage}, from ${start}`, passes.stages[stage]]
}

document.addEventListener("pointermove", event => {
  const mark = event.target.closest ? event.target.closest("[data-t], [data-p]") : null
  tip.classList.toggle("on", mark !== null)
  if (mark === null) return
  if (tip.shown !== mark) {
    tip.shown = mark
    const [title, ...lines] = told(mark)
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }))
    for (const line of lines) tip.append(Object.assign(document.createElement("div"), { textContent: line }))
  }
  const box = tip.getBoundingClientRect()
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 12)) + "px"
  const below = event.clientY + 18
  tip.style.top = (below + box.height > innerHeight - 8 ? event.clientY - box.height - 12 : below) + "px"
})
document.addEventListener("pointerleave", () => tip.classList.remove("on"))
