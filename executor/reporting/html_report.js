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

function show(event) {
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
}
document.addEventListener("pointermove", show)
document.addEventListener("pointerdown", show)  // a tap, where nothing hovers
document.addEventListener("pointerleave", () => tip.classList.remove("on"))

// A step's timeline: the wheel with Ctrl (or a pinch) zooms around the pointer, a drag moves it, a double click shows
// all of it again. Only its time axis changes, so that rows keep their height.
for (const picture of document.querySelectorAll("svg[data-passes]")) {
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number)
  let from = 0, span = width, held = null
  picture.setAttribute("preserveAspectRatio", "none")
  const draw = () => {
    from = Math.max(0, Math.min(width - span, from))
    picture.setAttribute("viewBox", `${from} 0 ${span} ${height}`)
    picture.style.aspectRatio = `${width} / ${height}`
    picture.classList.toggle("near", span < width)
    for (const words of picture.querySelectorAll("text")) {
      const at = Number(words.getAttribute("x"))
      words.setAttribute("transform", `translate(${at} 0) scale(${span / width} 1) translate(${-at} 0)`)
    }
  }
  const zoom = (factor, clientX) => {
    const box = picture.getBoundingClientRect(), share = (clientX - box.left) / box.width
    const next = Math.max(width / 200, Math.min(width, span * factor))
    from += share * (span - next)
    span = next
    draw()
  }
  picture.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return
    event.preventDefault()
    zoom(Math.exp(event.deltaY / 300), event.clientX)
  }, { passive: false })
  picture.addEventListener("dblclick", event => span < width ? (span = width, from = 0, draw()) : zoom(0.25, event.clientX))
  picture.addEventListener("pointerdown", event => {
    if (span === width || event.pointerType === "touch" && !event.isPrimary) return
    held = [event.clientX, from]
    picture.setPointerCapture(event.pointerId)
    picture.classList.add("held")
  })
  picture.addEventListener("pointermove", event => {
    if (held === null) return
    from = held[1] - (event.clientX - held[0]) / picture.getBoundingClientRect().width * span
    draw()
  })
  for (const end of ["pointerup", "pointercancel"]) {
    picture.addEventListener(end, () => { held = null; picture.classList.remove("held") })
  }
}
