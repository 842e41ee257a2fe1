package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/verify/bench"
)

// served is a number of kvport bench serve.
type served struct {
	at         string // the load, such as "0.5/s"; empty: there is one
	setup      string
	base       string // what it is compared with; empty: the others are compared with it
	quantity   string
	row        bench.Row
	interval   bool     // its ratio has one
	low, high  *float64 // of the interval; nil: without a bound
	overloaded bool     // the setup, at this load
	later      *float64 // how many later turns there are; nil: not known
}

// good is the beginning of the quantities that are shares of good requests.
const good = "good requests"

// quantities are those that tables and plots show, apart from shares of good requests by several SLOs.
func quantities() []string {
	return []string{"TTFT p50", "TTFT p99", "TTFT of later turns p50", "ITL p50", "ITL p99", good}
}

// numbers finds all numbers of setups among the rows of kvport bench serve, in their order, but those of variants.
func numbers(rows []bench.Row) []served {
	list, _ := separate(rows)
	return list
}

// separate finds all numbers, and apart from them those of setups beside the one of which they are a variant. All others are compared with one setup.
func separate(rows []bench.Row) (list, variants []served) {
	all := everything(rows)
	base := ""
	for _, n := range all {
		switch {
		case n.base == "" || n.base == base:
		case base == "":
			base = n.base
		default:
			variants = append(variants, n)
			continue
		}
		list = append(list, n)
	}
	return list, variants
}

// everything finds all numbers of setups among the rows of kvport bench serve, in their order.
func everything(rows []bench.Row) []served {
	named := map[string]bench.Row{}
	for _, r := range rows {
		named[r.Name] = r
	}
	var list []served
	for _, r := range rows {
		if isBound(r.Name) {
			continue
		}
		low, interval := named[r.Name+bench.LowBound]
		n := served{row: r, interval: interval, low: low.Value, high: named[r.Name+bench.HighBound].Value}
		rest, prefix := r.Name, ""
		if at, is := strings.CutPrefix(rest, "at "); is {
			n.at, rest, _ = strings.Cut(at, ", ")
			prefix = "at " + n.at + ", "
		}
		both, quantity, compared := strings.Cut(rest, ", ")
		if compared {
			n.setup, n.base, _ = strings.Cut(both, " : ")
		} else {
			n.setup, quantity, _ = strings.Cut(rest, ": ")
		}
		n.quantity = quantity
		_, n.overloaded = named[prefix+n.setup+": overloaded"]
		n.later = named[prefix+n.setup+": later turns"].Value
		list = append(list, n)
	}
	return list
}

// shown are those of a list whose quantity is one of some.
func shown(list []served, quantities ...string) (out []served) {
	for _, n := range list {
		if slices.Contains(quantities, n.quantity) {
			out = append(out, n)
		}
	}
	return out
}

// distinct are the values of a list, each once, in their order.
func distinct(list []served, value func(served) string) (out []string) {
	for _, n := range list {
		if v := value(n); !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// ServingTable is a Markdown table of what kvport bench serve has measured: a line for each load and setup. Times are in milliseconds, and what is
// compared has its ratio and the interval of that. Of a setup that was overloaded it only says this. If requests are good by several SLOs, a second
// table has the highest load that each setup bears.
func ServingTable(rows []bench.Row) string {
	all, variants := separate(rows)
	list := shown(all, quantities()...)
	columns := slices.DeleteFunc(quantities(), func(q string) bool { return len(shown(list, q)) == 0 })
	var b strings.Builder
	b.WriteString("| load | setup | " + strings.Join(columns, " | ") + " |\n|---|---|" + strings.Repeat("---:|", len(columns)) + "\n")
	for len(list) > 0 {
		first, cells := list[0], map[string]string{}
		for len(list) > 0 && list[0].at == first.at && list[0].setup == first.setup {
			cells[list[0].quantity] = list[0].cell()
			list = list[1:]
		}
		fmt.Fprintf(&b, "| %s | `%s` |", dash(first.at), first.setup)
		if first.overloaded {
			b.WriteString(" overloaded |" + strings.Repeat(" |", len(columns)-1) + "\n")
			continue
		}
		for _, quantity := range columns {
			b.WriteString(" " + dash(cells[quantity]) + " |")
		}
		b.WriteString("\n")
	}
	return b.String() + variantTable(shown(variants, quantities()...)) + bearable(all)
}

// variantTable has setups beside the one of which they are variants; empty if there is none.
func variantTable(list []served) string {
	if len(list) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("\n| load | setup | beside | what | value, ratio and interval |\n|---|---|---|---|---:|\n")
	for _, n := range list {
		cell := n.cell()
		if n.row.Ratio == nil {
			cell = "overloaded"
		}
		fmt.Fprintf(&b, "| %s | `%s` | `%s` | %s | %s |\n", dash(n.at), n.setup, n.base, n.quantity, cell)
	}
	return b.String()
}

// cell is a number in a table.
func (n *served) cell() string {
	value := bench.Number(n.row.Value)
	switch {
	case n.row.Value == nil && n.later != nil && *n.later == 0 && strings.Contains(n.quantity, "later turns"):
		return "none"
	case n.row.Value == nil:
		value = "failed"
	}
	if n.base == "" || n.row.Ratio == nil {
		return value
	}
	if !n.interval {
		return fmt.Sprintf("%s: **%s**", value, bench.Number(n.row.Ratio))
	}
	return fmt.Sprintf("%s: **%s** (%s to %s)", value, bench.Number(n.row.Ratio), bound(n.low), bound(n.high))
}

func bound(v *float64) string {
	if v == nil {
		return "no bound"
	}
	return bench.Number(v)
}

// goodEnough is the share of good requests at which a setup bears a load.
const goodEnough = 0.9

// bearable is a table of the highest load at which 90 % of the requests are good, by each of several SLOs; empty if there are not several. A setup that
// does not bear a load does not bear a higher one.
func bearable(all []served) string {
	list := slices.DeleteFunc(slices.Clone(all), func(n served) bool { return !strings.HasPrefix(n.quantity, good+" within ") })
	slos := distinct(list, func(n served) string { return strings.TrimPrefix(n.quantity, good+" within ") })
	if len(slos) == 0 {
		return ""
	}
	loads := distinct(list, func(n served) string { return n.at })
	var b strings.Builder
	b.WriteString("\nThe highest of these loads at which 90 % of the requests have their first token and the tokens that follow, on average, within\n\n")
	b.WriteString("| setup | " + strings.Join(slos, " | ") + " |\n|---|" + strings.Repeat("---:|", len(slos)) + "\n")
	for _, setup := range distinct(list, func(n served) string { return n.setup }) {
		fmt.Fprintf(&b, "| `%s` |", setup)
		for _, slo := range slos {
			most := "none"
			for _, load := range loads {
				i := slices.IndexFunc(list, func(n served) bool { return n.setup == setup && n.at == load && n.quantity == good+" within "+slo })
				if i < 0 || list[i].overloaded || list[i].row.Value == nil || *list[i].row.Value < goodEnough {
					break
				}
				most = dash(load)
			}
			if most == loads[len(loads)-1] {
				most += " or more"
			}
			b.WriteString(" " + most + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}
