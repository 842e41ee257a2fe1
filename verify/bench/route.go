package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// RouteOptions say what Route works with.
type RouteOptions struct {
	EngineOptions
	Self string // kvport
}

// The size of a measurement of routing.
const (
	routeRounds  = 12 // that count
	routeLearns  = 3  // before them, in which pd_aware learns how fast the engines are
	routeClients = 2  // each has one request at a time
	routeAnswer  = 8  // tokens
	// Of 12 ratios the median of all that could have been is between the third and the tenth with a probability of 96 %:
	// each of them is above it or below, as a coin falls.
	routeLeft = 2 // ratios at each end, outside the interval
)

// routeWay is one way to route; the first is compared with the others.
type routeWay struct {
	name, policy string
	prefill      bool
}

func routeWays() []routeWay {
	return []routeWay{{"pd_aware", "pd_aware", true}, {"always prefill", "round_robin", true}, {"never prefill", "round_robin", false}}
}

// routing is one prefill and one decode engine, with a router for each way.
type routing struct {
	RouteOptions
	client    cluster.Client
	processes []*cluster.Process // in the order of their start
	routers   []*cluster.Process
	means     [][]float64 // by way and round: ms to the first token
}

// Route measures how long the first token takes behind a router whose requests always go to the prefill engine, never do,
// or do if pd_aware says so. The three take turns, round by round, with prompts of the same lengths, of which each sees its
// own: short and long ones, and long ones that go on from one before.
func Route(ctx context.Context, o RouteOptions) (err error) {
	if o.Threads == 0 {
		o.Threads = max(1, runtime.GOMAXPROCS(0)/2) // of each engine
	}
	r := &routing{RouteOptions: o, means: make([][]float64, len(routeWays()))}
	defer func() { err = errors.Join(err, r.stop(context.WithoutCancel(ctx))) }()
	if err := r.start(ctx); err != nil {
		return err
	}
	learns, rounds := routeLearns, routeRounds
	if r.Quick {
		learns, rounds = 0, 2
	}
	for round := range learns + rounds {
		if round == learns {
			for i := range r.means {
				r.means[i] = nil
			}
		}
		for turn := range r.means {
			way := (round + turn) % len(r.means)
			mean, err := r.round(ctx, r.routers[way].URL, routePrompts(uint64(round), uint64(way), r.Quick))
			if err != nil {
				return fmt.Errorf("%s: %w", routeWays()[way].name, err)
			}
			r.means[way] = append(r.means[way], mean)
		}
	}
	return r.report(ctx)
}

// start starts the engines and routers.
func (r *routing) start(ctx context.Context) error {
	name, err := typicalPeers()
	if err != nil {
		return err
	}
	var urls [2]string
	for i, role := range []string{"kv_producer", "kv_consumer"} {
		args := []string{
			"serve", "--port", "0", "--model", r.Model, "--threads", fmt.Sprint(r.Threads), "--num-blocks", "512", "--weight-cache=false",
			"--kv-transfer-config", fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q}`, name, role),
		}
		for _, folder := range r.PluginPath {
			args = append(args, "--plugin-path", folder)
		}
		engine, err := r.run(ctx, role, args)
		if err != nil {
			return err
		}
		urls[i] = engine.URL
	}
	for _, way := range routeWays() {
		args := []string{"route", "--port", "0", "--policy", way.policy, "--decode", urls[1]}
		if way.prefill {
			args = append(args, "--prefill", urls[0])
		}
		router, err := r.run(ctx, way.name, args)
		if err != nil {
			return err
		}
		r.routers = append(r.routers, router)
	}
	return nil
}

func (r *routing) run(ctx context.Context, name string, args []string) (*cluster.Process, error) {
	p, err := cluster.Start(ctx, nil, name, r.Self, args...)
	if err == nil {
		r.processes = append(r.processes, p)
	}
	return p, err
}

// stop ends all processes, the routers first.
func (r *routing) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var errs []error
	for _, p := range slices.Backward(r.processes) {
		errs = append(errs, p.Stop(ctx))
	}
	return errors.Join(errs...)
}

// routePrompts are those of one round and way: the lengths are the round's, the tokens those of no other.
func routePrompts(round, way uint64, quick bool) (prompts [][]int32) {
	lengths, tokens := rand.New(rand.NewPCG(round, 1<<32)), rand.New(rand.NewPCG(round, way))
	scale := 16
	if quick {
		scale = 2
	}
	text := func(blocks int) []int32 {
		list := make([]int32, scale*(blocks+lengths.IntN(blocks)))
		for i := range list {
			list[i] = tokens.Int32N(256) // which every model has
		}
		return list
	}
	var long [][]int32
	for _, kind := range "LsLsRsLRsLRs" {
		switch kind {
		case 's':
			prompts = append(prompts, text(2))
		case 'L':
			long = append(long, text(20))
			prompts = append(prompts, long[len(long)-1])
		case 'R': // a long one of those before that are over by now, and more
			prompts = append(prompts, slices.Concat(long[0], text(2)))
			long = long[1:]
		}
	}
	return prompts
}

// round sends prompts, and returns the mean time to the first token in milliseconds.
func (r *routing) round(ctx context.Context, url string, prompts [][]int32) (mean float64, err error) {
	next := make(chan []int32, len(prompts))
	for _, p := range prompts {
		next <- p
	}
	close(next)
	var sums [routeClients]time.Duration
	var errs [routeClients]error
	var clients sync.WaitGroup
	for i := range routeClients {
		clients.Go(func() {
			for p := range next {
				got, err := r.client.Complete(ctx, url, cluster.Request{Tokens: p, MaxTokens: routeAnswer, IgnoreEOS: true})
				if err != nil {
					errs[i] = err
					return
				}
				sums[i] += got.TTFT
			}
		})
	}
	clients.Wait()
	for _, sum := range sums {
		mean += float64(sum) / float64(time.Millisecond) / float64(len(prompts))
	}
	return mean, errors.Join(errs[:]...)
}

// report emits how much sooner the first token is there by the first way than by each of the others.
func (r *routing) report(ctx context.Context) error {
	own := r.means[0]
	for i, way := range routeWays()[1:] {
		other := r.means[i+1]
		ratios := make([]float64, len(own))
		for round := range own {
			ratios[round] = other[round] / own[round]
		}
		low, median, high := routeInterval(ratios)
		name := "first token, pd_aware : " + way.name
		row := shorter(name, 0, middle(slices.Clone(own)), middle(slices.Clone(other)), "ms")(budget{})
		row.Ratio = round(median)
		for _, row := range []Row{
			row, {Name: name + ", 96 % from", Value: round(low), Unit: "ratio"}, {Name: name + ", 96 % to", Value: round(high), Unit: "ratio"},
		} {
			if err := r.Emit(row); err != nil {
				return err
			}
		}
	}
	m, err := r.client.Metrics(ctx, r.routers[0].URL)
	if err != nil {
		return err
	}
	share := 100 * m.Sum("kvport_router_handoffs_total", `reason="skipped"`) / m.Sum("kvport_router_requests_total")
	return r.Emit(Row{Name: "requests that pd_aware keeps from prefill", Value: round(share), Unit: "%"})
}

// routeInterval is the median of ratios of rounds, and between what it is said to be.
func routeInterval(ratios []float64) (low, median, high float64) {
	slices.Sort(ratios)
	n := len(ratios)
	left := 0
	if n >= routeRounds {
		left = routeLeft
	}
	return ratios[left], (ratios[(n-1)/2] + ratios[n/2]) / 2, ratios[n-1-left]
}
