package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// lifeCase is a case of what every plugin promises about opening, closing, starting and ending.
func lifeCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Lifecycle}, Run: rigged(0, false, body)}
}

func lifeCases() []Case {
	return []Case{
		lifeCase("reopen-orders", "OPEN-01", "Sides open and close in 30 random orders, and those that are open work.", reopenOrders),
		lifeCase("close-twice", "LIFE-01", "A second Close of a side disturbs no other side.", closeTwice),
		lifeCase("bad-env", "LIFE-02", "Opens with an impossible role, rank, world or layout are refused.", badEnv),
		lifeCase("many-sides", "LIFE-03", "Eight lives of an engine have their sides open at once, and each works.", manySides),
		lifeCase("close-after-cancel", "LIFE-04", "Sides close within 2 s after their calls were cancelled.", closeAfterCancel),
		lifeCase("close-after-miss", "LIFE-04", "Sides close within 2 s after their calls found nothing, or a part.", closeAfterMiss),
		lifeCase("describe-pure", "CONF-02", "50 Describes run at once, beside open sides, and leave nothing behind.", describePure),
		lifeCase("manifest", "CONF-03", "The manifest names the same connector, powers and fields.", manifest),
		lifeCase("heartbeat", "LIFE-05", "Heartbeats are answered within 1 s while 64 loads and saves run.", heartbeat),
		lifeCase("idle", "STORE-01", "Nobody calls for four seconds: what was saved is there, and the first calls then work.", idle),
		lifeCase("sigterm", "LIFE-06", "SIGTERM and SIGINT do not end an open side.", sigterm),
	}
}

// idle lets time pass. A time that is read in the wrong unit, or a connection that somebody has closed, shows only then.
func idle(r *rig) {
	const long = 4 * time.Second
	e := r.engine(setup{})
	keys := e.keys(3)
	saved := time.Now()
	e.save(blocks(0, keys...)...)
	e.whole(keys, 4)
	e.pause(long)
	to := blocks(8, keys...)
	e.wipe(0, to...)
	err := e.load(to...)
	if n := e.match(keys...); n < len(keys) {
		if option := r.limitsTime(time.Since(saved)); option != "" {
			r.unfit(fmt.Sprintf("blocks were gone after %v, as option %s says: give the connector a config that keeps them for some minutes", long, option))
		}
		r.Errorf("%d of %d blocks are offered after %v in which nobody called, and no option of the config says that it limits their time", n, len(keys), long)
		return
	}
	r.must(err, "the first load after %v in which nobody called", long)
	e.holds(to...)
	e.works("afterwards")
}

// ofTime are words in the names of options that say how long a block is kept.
var ofTime = regexp.MustCompile(`(?i)ttl|expir|life|retention|max_?age`)

// limitsTime is the option by which the config has blocks given up within a time: one of which the schema says that it bounds seconds, or one
// with such a name. It is "" if there is none.
func (r *rig) limitsTime(within time.Duration) string {
	r.Helper()
	options, config := r.options()
	for _, name := range slices.Sorted(maps.Keys(options)) {
		option := options[name]
		if option.Bounds != boundsSeconds && !ofTime.MatchString(name) {
			continue
		}
		value, set := config[name]
		if !set {
			value = option.Default
		}
		if d := inTime(name, value); d > 0 && d <= within {
			return name
		}
	}
	return ""
}

// inTime reads a number, in milliseconds if the name of the option ends so and else in seconds, or a text such as "5s"; 0: it is neither.
func inTime(name string, value json.RawMessage) time.Duration {
	var text string
	if json.Unmarshal(value, &text) == nil {
		d, _ := time.ParseDuration(text)
		return d
	}
	var number float64
	_ = json.Unmarshal(value, &number)
	if strings.HasSuffix(strings.ToLower(name), "_ms") {
		return time.Duration(number * float64(time.Millisecond))
	}
	return time.Duration(number * float64(time.Second))
}

// works saves and loads on whatever sides are open.
func (e *engine) works(what string) {
	e.Helper()
	keys := e.keys(2)
	if e.workers[0] != nil {
		t := transfer(blocks(0, keys...))
		e.fill(t.Blocks...)
		e.must(e.moveRank(e.Context(), 0, &t, true), "%s: save", what)
		to := transfer(blocks(4, keys...))
		e.wipe(0, to.Blocks...)
		e.must(e.moveRank(e.Context(), 0, &to, false), "%s: load", what)
		e.holds(to.Blocks...)
	}
	if e.scheduler != nil {
		want := 0
		if e.workers[0] != nil {
			want = len(keys)
		}
		e.equal(want, e.match(keys...), "%s: blocks offered", what)
	}
}

func reopenOrders(r *rig) {
	e := r.closed(setup{})
	for n := range 30 {
		switch scheduler := e.rand.IntN(2) == 0; {
		case scheduler && e.scheduler == nil:
			e.openScheduler()
		case scheduler:
			r.must(e.closeScheduler(), "close the scheduler side")
		case e.workers[0] == nil:
			e.openWorker(0)
		default:
			r.must(e.closeWorker(0), "close the worker side")
		}
		e.works(fmt.Sprintf("after %d changes", n+1))
	}
}

func closeTwice(r *rig) {
	e := r.engine(setup{})
	other := *e // more sides of the same engine
	other.scheduler, other.workers = nil, make([]connector.Worker, 1)
	other.openAll()
	for range 2 {
		_ = e.scheduler.Close() // what a second Close returns is up to the connector
		_ = e.workers[0].Close()
	}
	e.scheduler, e.workers[0] = nil, nil
	other.works("after another side was closed twice")
	e.openAll()
	e.works("after the sides opened again")
}

func badEnv(r *rig) {
	e := r.closed(setup{})
	bad := map[string]func(*connector.Env){
		"role 0":         func(v *connector.Env) { v.Role = 0 },
		"role 9":         func(v *connector.Env) { v.Role = 9 },
		"world 0":        func(v *connector.Env) { v.World = 0 },
		"no engine":      func(v *connector.Env) { v.Engine = "" },
		"no blocks":      func(v *connector.Env) { v.Layout.Blocks = 0 },
		"no groups":      func(v *connector.Env) { v.Layout.Groups = nil },
		"no segments":    func(v *connector.Env) { v.Layout.Segments = nil },
		"empty blocks":   func(v *connector.Env) { v.Layout.Groups = []connector.Group{{Policy: connector.PolicyAll}} },
		"a lost segment": func(v *connector.Env) { v.Layout.Segments[0].Group = 7 },
		"a short stride": func(v *connector.Env) { v.Layout.Segments[0].BlockStride = 1 },
	}
	refused := func(what string, err error) {
		if err == nil {
			r.Errorf("%s is accepted", what)
		} else if !errors.Is(err, connector.ErrIncompatible) {
			r.Errorf("%s: error %q does not wrap ErrIncompatible", what, err)
		}
	}
	for name, change := range bad {
		env := e.env
		env.Layout.Segments = slices.Clone(env.Layout.Segments)
		change(&env)
		w, err := e.inst.Worker(r.Context(), env, r.config)
		refused("a worker side with "+name, err)
		if err == nil {
			r.must(w.Close(), "close")
		}
	}
	env := e.env
	env.Rank = env.World
	w, err := e.inst.Worker(r.Context(), env, r.config)
	refused("a worker side with a rank beyond the world", err)
	if err == nil {
		r.must(w.Close(), "close")
	}
	e.openAll()
	e.works("after refused opens")
}

func manySides(r *rig) {
	const lives = 8
	first := r.closed(setup{})
	engines := make([]*engine, lives)
	for i := range engines {
		e := *first
		e.env.Epoch += uint64(i)
		e.workers = make([]connector.Worker, 1)
		engines[i] = &e
		e.openAll()
	}
	keys := make([][]connector.BlockKey, lives)
	errs := make([]error, lives)
	for i, e := range engines {
		keys[i] = e.keys(1)
		e.fill(blocks(2*i, keys[i]...)...)
		e.wipe(0, blocks(2*i+1, keys[i]...)...)
	}
	together(lives, func(i int) {
		save, load := transfer(blocks(2*i, keys[i]...)), transfer(blocks(2*i+1, keys[i]...))
		errs[i] = engines[i].workers[0].Save(r.Context(), &save, first.kv[0])
		if errs[i] == nil {
			errs[i] = engines[i].workers[0].Load(r.Context(), &load, first.kv[0])
		}
	})
	for i, e := range engines {
		r.must(errs[i], "save and load in life %d of %d", i, lives)
		e.holds(blocks(2*i+1, keys[i]...)...)
		r.equal(1, e.match(keys[i]...), "blocks offered in life %d", i)
		r.must(e.closeWorker(0), "close")
		r.must(e.closeScheduler(), "close")
	}
}

func closeAfterCancel(r *rig) {
	e := r.closed(setup{})
	keys := e.keys(4)
	for range 5 {
		e.openAll()
		e.save(blocks(0, keys...)...)
		ctx, cancel := context.WithCancel(r.Context())
		time.AfterFunc(time.Duration(e.rand.IntN(1000))*time.Microsecond, cancel)
		together(8, func(i int) {
			t := transfer(blocks(4+2*i, keys[i%2*2:i%2*2+2]...))
			if i%2 == 0 {
				_ = e.workers[0].Load(ctx, &t, e.kv[0])
			} else {
				t = transfer(blocks(0, keys...))
				_ = e.workers[0].Save(ctx, &t, e.kv[0])
			}
		})
		cancel()
		e.closesSoon("after calls were cancelled")
	}
	e.openAll()
	e.works("after the sides opened again")
	if r.info.Scope != connector.ScopeEngine {
		r.equal(len(keys), e.match(keys...), "blocks offered after the sides opened again")
	}
}

// closesSoon closes the sides of a rank and fails the case if that takes longer than it may.
func (e *engine) closesSoon(when string) {
	e.Helper()
	scheduler, worker := e.scheduler, e.workers[0]
	e.scheduler, e.workers[0] = nil, nil
	err := e.returns("Close "+when, 0, func(context.Context) error { return errors.Join(worker.Close(), scheduler.Close()) })
	e.must(err, "close %s", when)
}

// closeAfterMiss closes sides after calls that missed: what a call takes first is easily left where it then finds nothing.
func closeAfterMiss(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	for range 3 {
		absent := e.keys(2)
		e.match(absent...)
		_ = e.load(blocks(4, absent...)...)
		_ = e.load(blocks(8, keys[0], absent[0])...)
		e.match(keys[0], absent[1])
		e.closesSoon("after calls that missed")
		e.openAll()
	}
	e.works("after the sides opened again")
}

func describePure(r *rig) {
	const many, tolerance = 50, 3
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	before := openFiles(e.inst.PID)
	infos, errs := make([]connector.Info, many), make([]error, many)
	for range 4 {
		together(many, func(i int) { infos[i], errs[i] = e.inst.Describe(r.Context(), r.config) })
		for i, err := range errs {
			r.must(err, "Describe %d of %d at once", i, many)
			if infos[i].Name != r.info.Name || infos[i].Scope != r.info.Scope || infos[i].Capabilities != r.info.Capabilities {
				r.Errorf("Describe answered %+v, at first %+v", infos[i], r.info)
				return
			}
		}
	}
	if now := openFiles(e.inst.PID); now > before+tolerance {
		r.Errorf("%d Describes opened %d file descriptors", 4*many, now-before)
	}
	e.works("after many Describes")
	r.equal(2, e.match(keys...), "blocks offered after many Describes")
	if b, ok := r.harness().(Backend); ok && b.Folder() != "" {
		fresh, err := os.MkdirTemp("", "kvport-conform-")
		r.must(err, "folder")
		defer os.RemoveAll(fresh)
		_, err = e.inst.Describe(r.Context(), r.moved(fresh))
		r.must(err, "Describe with another folder")
		entries, err := os.ReadDir(fresh)
		r.must(err, "folder")
		if len(entries) > 0 {
			r.Errorf("Describe made %s in its folder", entries[0].Name())
		}
	}
}

// manifest compares what the plugin prints with what Describe answers.
func manifest(r *rig) {
	e := r.closed(setup{})
	offers, ok := r.harness().(Manifester)
	if !ok {
		r.Skipf("the harness knows no manifest")
	}
	m, err := offers.Manifest(r.Context())
	r.must(err, "manifest")
	info, err := e.inst.Describe(r.Context(), r.config)
	r.must(err, "describe")
	if !m.Answers(info.Name) {
		r.Errorf("Describe says %q, the manifest %q %q", info.Name, m.Name, m.Aliases)
	}
	for _, name := range info.Capabilities.Names() {
		if !slices.Contains(m.Capabilities, name) {
			r.Errorf("Describe claims %s, the manifest only %q", name, m.Capabilities)
		}
	}
	var schema struct {
		Properties map[string]json.RawMessage `json:"properties"`
		Required   []string                   `json:"required"`
	}
	if err := json.Unmarshal(m.ConfigSchema, &schema); err != nil {
		r.Errorf("the manifest's config_schema is no JSON Schema: %v", err)
		return
	}
	var config map[string]json.RawMessage
	r.must(json.Unmarshal(r.config, &config), "config")
	for name := range config {
		if _, known := schema.Properties[name]; !known {
			r.Errorf("config field %s works, the manifest's schema does not know it", name)
		}
	}
	for _, name := range schema.Required {
		if _, given := config[name]; !given {
			r.Errorf("the config works without %s, the manifest's schema requires it", name)
		}
	}
}

func heartbeat(r *rig) {
	const limit = time.Second
	layout := planes(512)
	e := r.engine(setup{layout: &layout})
	p := e.process()
	keys := e.keys(200)
	e.save(blocks(0, keys...)...)
	ctx, cancel := context.WithCancel(r.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		together(64, func(i int) {
			for ctx.Err() == nil {
				t := transfer(blocks(200+4*i, keys[i:i+4]...))
				if i%8 == 0 {
					t = transfer(blocks(0, keys...))
					_ = e.workers[0].Save(ctx, &t, e.kv[0])
				} else {
					_ = e.workers[0].Load(ctx, &t, e.kv[0])
				}
			}
		})
	}()
	for n := range 10 {
		beat, stop := context.WithTimeout(r.Context(), loadStretch*limit)
		began := time.Now()
		err := p.Heartbeat(beat)
		stop()
		if err != nil || r.watched().spent(began) > limit {
			e.kill() // calls that hang end with their process
			r.overdue(began, "heartbeat %d was not answered within %v: %v", n, limit, err)
			break
		}
		e.pause(askAgain)
	}
	cancel()
	cancelled := time.Now()
	if _, came := awaited(r, done, 2*soon); !came {
		defer func() {
			e.kill()
			<-done
		}()
		r.overdue(cancelled, "calls have not returned %v after they were cancelled", 2*soon)
	}
}

func sigterm(r *rig) {
	e := r.engine(setup{})
	p := e.process()
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGTERM} {
		e.signal(s)
		e.pause(50 * time.Millisecond)
		select {
		case <-p.Done():
			e.inst.killed = true
			r.Errorf("%v ended the process while its sides were open", s)
			return
		default:
		}
		e.works(fmt.Sprintf("after %v", s))
	}
}
