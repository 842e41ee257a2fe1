package fleet

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/kvport/kvport/engine/router/policy"
)

// Row is one fleet of a table.
type Row struct {
	Name string
	*Result
}

// Policies plays a trace with every policy; prefix_aware also with nothing but its history, and with an oracle, which tells it
// what each cache holds.
func Policies(ctx context.Context, o Options, done func(Row)) error {
	for _, name := range policy.Names() {
		one := o
		one.Policy = name
		if err := play(ctx, name, one, done); err != nil {
			return err
		}
		if name != policy.PrefixAware {
			continue
		}
		for _, how := range []Knowledge{ByHistory, ByOracle} {
			one.Knowledge = how
			if err := play(ctx, name+", "+how.String(), one, done); err != nil {
				return err
			}
		}
	}
	return nil
}

// String is the knowledge as tables name it.
func (k Knowledge) String() string { return [...]string{"by events", "by history", "by an oracle"}[k] }

// Incidents plays a trace without a fault and then with each.
func Incidents(ctx context.Context, o Options, done func(Row)) error {
	for _, f := range append([]Fault{NoFault}, Faults()...) {
		one := o
		one.Fault = f
		if err := play(ctx, f.String(), one, done); err != nil {
			return err
		}
	}
	return nil
}

func play(ctx context.Context, name string, o Options, done func(Row)) error {
	r, err := Run(ctx, o)
	if err == nil {
		done(Row{name, r})
	}
	return err
}

// Size is a fleet of a size, and its traffic.
type Size struct {
	Instances int
	*Result
}

// sized are the options of a fleet of another size, with as many requests and blocks for each instance.
func (o *Options) sized(instances int) Options {
	one := *o
	one.Instances, one.Blocks, one.Requests = instances, o.Blocks/o.Instances*instances, max(1, o.Requests/o.Instances)*instances
	return one
}

// CheckSizes says what is wrong with the sizes of fleets, or with a fleet of one of them. The options alone must be good except
// their number of blocks.
func CheckSizes(o Options, sizes []int) error {
	for i, n := range sizes {
		if slices.Contains(sizes[:i], n) {
			return fmt.Errorf("size %d appears twice", n)
		}
		one := o.sized(n)
		if err := one.Check(); err != nil {
			return fmt.Errorf("size %d: %w", n, err)
		}
	}
	return nil
}

// Sizes plays fleets of several sizes, each with as many requests and blocks for each instance as the options say.
func Sizes(ctx context.Context, o Options, sizes []int, done func(Size)) error {
	for _, n := range sizes {
		r, err := Run(ctx, o.sized(n))
		if err != nil {
			return err
		}
		done(Size{n, r})
	}
	return nil
}

// Rate is how many messages, or blocks, of one kind come to routers in a second of virtual time.
type Rate struct {
	Name   string
	Second float64
}

// Rates are those of all traffic.
func (r *Result) Rates() []Rate {
	t := &r.UntilRest
	var list []Rate
	for _, one := range []struct {
		name string
		n    int
	}{
		{"registrations", t.Registrations + t.Refused},
		{"health checks", t.Probes},
		{"batches of events", t.Batches},
		{"blocks stored", t.Stored},
		{"blocks removed", t.Removed},
		{"decisions", t.Decisions},
	} {
		list = append(list, Rate{one.name, float64(one.n) / r.Seconds})
	}
	return list
}

// Growth is the exponent with which something grows with the number of instances: 1 means that twice as many instances make
// twice as much. It is the slope of a line through the logarithms of what the sizes have. ok is false if fewer than two have any.
func Growth(sizes []Size, of func(*Result) float64) (exponent float64, ok bool) {
	var n, x, y, xx, xy float64
	for _, s := range sizes {
		is := of(s.Result)
		if is <= 0 {
			continue
		}
		a, b := math.Log(float64(s.Instances)), math.Log(is)
		n, x, y, xx, xy = n+1, x+a, y+b, xx+a*a, xy+a*b
	}
	if n < 2 {
		return 0, false
	}
	return (n*xy - x*y) / (n*xx - x*x), true
}

// Table writes the rows of fleets that were played by the same trace.
func Table(out io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\thits\tbest\tmissing\tprefill max\tdecode max\tTTFT ms\tp99\tretries\tfailed\tgaps\tforgotten\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%.1f %%\t%.1f %%\t%.1f %%\t%.2f\t%.2f\t%.0f\t%.0f\t%d\t%d\t%d\t%d\t\n", r.Name,
			100*r.HitRate(), 100*r.BestRate(), 100*r.OverRate(), r.Prefill, r.Decode,
			r.MeanTTFT, r.P99TTFT, r.Retries, r.Failed, r.Traffic.Gaps, r.Traffic.Lost)
	}
	return t.Flush()
}

// GrowthTable writes what comes to routers in a second, by the size of the fleet, and the exponents with which that grows.
func GrowthTable(out io.Writer, sizes []Size) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "in a second\t")
	for _, s := range sizes {
		fmt.Fprintf(t, "%d instances\t", s.Instances)
	}
	fmt.Fprintln(t, "exponent\t")
	if len(sizes) == 0 {
		return t.Flush()
	}
	for i, kind := range sizes[0].Rates() {
		fmt.Fprintf(t, "%s\t", kind.Name)
		for _, s := range sizes {
			fmt.Fprintf(t, "%.1f\t", s.Rates()[i].Second)
		}
		if exponent, ok := Growth(sizes, func(r *Result) float64 { return r.Rates()[i].Second }); ok {
			fmt.Fprintf(t, "%.3f\t\n", exponent)
		} else {
			fmt.Fprint(t, "-\t\n")
		}
	}
	return t.Flush()
}

// MeasuredTable writes what depends on the machine on which the simulation runs.
func MeasuredTable(out io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "measured here\tdecisions a second\tblocks in the index\tbytes a block\theap MiB\t")
	for _, r := range rows {
		if m := r.Measured; m != nil {
			fmt.Fprintf(t, "%s\t%.0f\t%d\t%.1f\t%d\t\n", r.Name, m.DecisionsPerSecond, r.IndexBlocks, m.BytesPerBlock, m.HeapBytes>>20)
		}
	}
	return t.Flush()
}
