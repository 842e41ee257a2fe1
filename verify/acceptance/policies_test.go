package acceptance

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

var flagFaults = flag.Int("faults", 6, "faults of engines under each policy of the router; each is of one turn")

// ownHost is where the engines of TestPoliciesUnderFaults listen. Nobody else has ports there, so an engine that
// was killed comes back at its own.
const ownHost = "127.0.0.78"

// question is one request of a conversation, with the tokens of a single node's answer.
type question struct {
	cluster.Request
	conversation int
	stream       bool
	want         []int32
}

// converse plans conversations, turn by turn. Each turn goes on from the answer to an earlier one, two of them from
// some. Half of the conversations are greedy, the others sample with a seed.
func converse(r *rig.Rig, conversations, turns, answer int) (plan [][]*question) {
	r.Helper()
	node := r.Serve("single", "")
	texts := rig.Texts(r.T, *rig.Seed+60000, 2*conversations*turns, 120, 240)
	before := make([][]int32, conversations)
	asked := 0
	for turn := range turns {
		var list []*question
		for c := range conversations {
			follow := 1
			if turn > 0 && (turn+c)%3 == 0 {
				follow = 2
			}
			for range follow {
				q := &question{conversation: c, stream: asked%2 == 0}
				q.Request = cluster.Request{Tokens: slices.Concat(before[c], tokenize(r, node, texts[asked])), MaxTokens: answer, IgnoreEOS: true}
				if c%2 == 1 {
					q.Temperature, q.Seed = 0.8, int64(asked)
				}
				list = append(list, q)
				asked++
			}
		}
		var g errgroup.Group
		g.SetLimit(2)
		for _, q := range list {
			g.Go(func() error {
				got, err := r.Client.Complete(r.Context(), node.URL, q.Request)
				if err == nil {
					q.want = got.Tokens
				}
				return err
			})
		}
		require.NoError(r, g.Wait())
		for _, q := range list {
			require.Len(r, q.want, answer)
			before[q.conversation] = slices.Concat(q.Tokens, q.want)
		}
		plan = append(plan, list)
	}
	r.Stop(node)
	return plan
}

// tokenize asks an engine for the tokens of a text.
func tokenize(r *rig.Rig, node *cluster.Process, text string) []int32 {
	r.Helper()
	body, err := json.Marshal(map[string]string{"prompt": text})
	require.NoError(r, err)
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, node.URL+"/tokenize", bytes.NewReader(body))
	require.NoError(r, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.Client.HTTP.Do(req)
	require.NoError(r, err)
	defer resp.Body.Close()
	var answer struct{ Tokens []int32 }
	require.NoError(r, json.NewDecoder(resp.Body).Decode(&answer))
	require.NotEmpty(r, answer.Tokens, "HTTP %d", resp.StatusCode)
	return answer.Tokens
}

// instance is an engine that comes back at its own address.
type instance struct {
	*cluster.Process
	start func(port string) *cluster.Process
}

// again starts an instance that is gone.
func (in *instance) again(r *rig.Rig) {
	r.Helper()
	at, err := url.Parse(in.URL)
	require.NoError(r, err)
	in.Process = in.start(at.Port())
}

// fault is what happens to an instance.
type fault struct {
	kind string // killed, stopped (SIGSTOP), or hung: what is at its port accepts connections and answers nothing
	role string // of the instance
}

// inflict makes the fault happen and gives what ends it.
func (f fault) inflict(r *rig.Rig, in *instance) (mend func()) {
	r.Helper()
	switch f.kind {
	case "stopped":
		require.NoError(r, in.Signal(syscall.SIGSTOP))
		return func() { require.NoError(r, in.Signal(syscall.SIGCONT)) }
	case "hung":
		in.Kill()
		hangUp := hang(r, strings.TrimPrefix(in.URL, "http://"))
		return func() {
			hangUp()
			in.again(r)
		}
	}
	in.Kill()
	return func() { in.again(r) }
}

// hang accepts connections at an address and answers nothing, until the function that it gives is called.
func hang(r *rig.Rig, address string) (stop func()) {
	r.Helper()
	l, err := new(net.ListenConfig).Listen(r.Context(), "tcp", address)
	require.NoError(r, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var open []net.Conn
		for {
			conn, err := l.Accept()
			if err != nil {
				break
			}
			open = append(open, conn)
		}
		for _, conn := range open {
			conn.Close()
		}
	}()
	stop = func() {
		l.Close()
		<-ended
	}
	r.Cleanup(stop)
	return stop
}

// routed is two prefill and two decode engines behind a router with one policy, and clients of it.
type routed struct {
	*rig.Rig
	p, d   [2]*instance
	router *cluster.Process

	begun    chan string   // where a stream has begun: base URLs of decode instances
	ended    chan struct{} // a question is answered
	compared atomic.Int64  // tokens
	cut      atomic.Int64  // streams that ended with an error event
}

// newRouted starts the engines; route starts a router.
func newRouted(r *rig.Rig, f *fixture.Fixture) *routed {
	r.Helper()
	x := &routed{Rig: r}
	engine := func(name string) *instance {
		in := &instance{start: func(port string) *cluster.Process {
			return r.Serve(name, turnsConfig(f), "--host", ownHost, "--port", port, "--kv-events-config", `{"enable_kv_cache_events":true}`)
		}}
		in.Process = in.start("0")
		return in
	}
	for i := range x.p {
		x.p[i], x.d[i] = engine(fmt.Sprintf("prefill %d", i)), engine(fmt.Sprintf("decode %d", i))
	}
	return x
}

// route starts a router with a policy, or with --mode replica.
func (x *routed) route(policy string) {
	x.Helper()
	args := []string{"route", "--port", "0", "--health-timeout", "3s"} // a busy machine does not make an engine seem down
	if policy == "replica" {
		args = append(args, "--mode", "replica", "--policy", "prefix_aware")
		for i := range x.p {
			args = append(args, "--replica", fmt.Sprintf("%d=prefill:%s;decode:%s", i, x.p[i].URL, x.d[i].URL))
		}
	} else {
		args = append(args, "--policy", policy, "--prefill", x.p[0].URL+","+x.p[1].URL, "--decode", x.d[0].URL+","+x.d[1].URL)
	}
	x.router = x.Start("router "+policy, args...)
	x.compared.Store(0)
	x.cut.Store(0)
}

// states says how the router finds its instances, by URL.
func (x *routed) states() map[string]string {
	data, _ := x.Client.Get(x.Context(), x.router.URL+"/health") // a router without an instance answers 503
	var h struct {
		Instances []struct{ URL, State string }
	}
	_ = json.Unmarshal(data, &h) // then no instance is in any state
	states := map[string]string{}
	for _, in := range h.Instances {
		states[in.URL] = in.State
	}
	return states
}

// up waits until the router finds all instances well.
func (x *routed) up() {
	x.Helper()
	require.Eventually(x, func() bool {
		states := x.states()
		for _, in := range slices.Concat(x.p[:], x.d[:]) {
			if states[in.URL] != "up" {
				return false
			}
		}
		return true
	}, time.Minute, 50*time.Millisecond, "instances are up again")
}

// turn asks the questions of a turn, four at a time. A fault happens in the midst of them, if there is one.
func (x *routed) turn(questions []*question, salt string, f *fault, rng *rand.Rand) {
	x.Helper()
	x.begun, x.ended = make(chan string, len(questions)), make(chan struct{}, len(questions))
	ctx, cancel := context.WithTimeout(x.Context(), 10*time.Minute)
	defer cancel()
	var failed error
	over := make(chan struct{})
	go func() {
		defer close(over)
		var g errgroup.Group
		g.SetLimit(4)
		for _, q := range questions {
			asked := *q
			asked.Salt = salt
			g.Go(func() error { return x.serve(ctx, &asked) })
		}
		failed = g.Wait()
	}()
	if f != nil {
		x.amid(over, f, rng)
	}
	<-over
	require.NoError(x, failed)
	x.up()
}

// amid makes a fault happen while a stream runs: on its decode instance, or on a prefill instance. It ends when the
// router has noticed it, and some more questions have been answered, or all.
func (x *routed) amid(over <-chan struct{}, f *fault, rng *rand.Rand) {
	x.Helper()
	var at string
	for range 1 + rng.IntN(1+cap(x.begun)/8) {
		select {
		case at = <-x.begun:
		case <-over: // at is where the last stream began
		}
	}
	if at == "" { // all is over: what has begun is in the channel
		select {
		case at = <-x.begun:
		default:
			require.Fail(x, "no stream has begun")
		}
	}
	in := x.p[rng.IntN(len(x.p))]
	if f.role == "decode" {
		i := slices.IndexFunc(x.d[:], func(in *instance) bool { return in.URL == at })
		require.GreaterOrEqual(x, i, 0, "the decode instance of a stream is %q", at)
		in = x.d[i]
	}
	mend := f.inflict(x.Rig, in)
	require.Eventually(x, func() bool { return x.states()[in.URL] == "down" }, time.Minute, 20*time.Millisecond, "the router notices that an instance is %s", f.kind)
	for range 1 + rng.IntN(4) {
		select {
		case <-x.ended:
		case <-over:
		}
	}
	mend()
}

// serve asks a question until its answer is whole: a client whose stream was cut asks again. Every token that comes is
// the single node's, also before a cut.
func (x *routed) serve(ctx context.Context, q *question) error {
	for range 4 { // there is one fault at a time
		tokens, cut, err := x.ask(ctx, q)
		if err != nil {
			return fmt.Errorf("conversation %d, %d tokens, stream %v: %w", q.conversation, len(q.Tokens), q.stream, err)
		}
		if len(tokens) > len(q.want) || !slices.Equal(tokens, q.want[:len(tokens)]) || !cut && len(tokens) < len(q.want) {
			return fmt.Errorf("conversation %d, %d tokens, stream %v: tokens differ: %d instead of %d", q.conversation, len(q.Tokens), q.stream, tokens, q.want)
		}
		x.compared.Add(int64(len(tokens)))
		if !cut {
			x.ended <- struct{}{}
			return nil
		}
		x.cut.Add(1)
	}
	return fmt.Errorf("conversation %d: one stream after the other is cut", q.conversation)
}

// ask makes one request. cut says that its stream ended with an error event.
func (x *routed) ask(ctx context.Context, q *question) (tokens []int32, cut bool, err error) {
	body, err := json.Marshal(struct {
		cluster.Request
		Prompt       []int32 `json:"prompt"`
		Stream       bool    `json:"stream"`
		ReturnTokens bool    `json:"return_token_ids"`
	}{q.Request, q.Tokens, q.stream, true})
	if err != nil {
		return nil, false, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.router.URL+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, false, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-Id", strconv.Itoa(q.conversation))
	req.Header.Set("X-Kvport-Route", "1")
	resp, err := x.Client.HTTP.Do(req)
	if err != nil {
		return nil, false, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK && q.stream {
		return x.listen(resp)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, false, err
	}
	var a rig.Answer
	if resp.StatusCode != http.StatusOK || json.Unmarshal(data, &a) != nil || len(a.Choices) != 1 {
		return nil, false, fmt.Errorf("%s: %s", resp.Status, data)
	}
	return a.Choices[0].Tokens, false, nil
}

// listen reads a stream. One that is not whole must end with an error event that blames the instance.
func (x *routed) listen(resp *http.Response) (tokens []int32, cut bool, err error) {
	_, choice, _ := strings.Cut(resp.Header.Get("X-Kvport-Route"), "decode=")
	at, _, _ := strings.Cut(choice, ";")
	var half error // of an event that is not JSON: the last one before a cut may be half an event
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, isEvent := strings.CutPrefix(lines.Text(), "data: ")
		if !isEvent {
			continue
		}
		if data == "[DONE]" {
			return tokens, false, half
		}
		var e struct {
			rig.Answer
			Error *struct{ Code string } `json:"error"`
		}
		switch err := json.Unmarshal([]byte(data), &e); {
		case half != nil && e.Error == nil:
			return nil, false, half
		case err != nil:
			half = fmt.Errorf("event %q: %w", data, err)
			continue
		case e.Error != nil && e.Error.Code != "upstream_error" && e.Error.Code != "upstream_timeout":
			return nil, false, fmt.Errorf("the stream ended with %s", data)
		case e.Error != nil:
			return tokens, true, nil
		}
		if len(tokens) == 0 {
			select {
			case x.begun <- at:
			default:
			}
		}
		for _, choice := range e.Choices {
			tokens = append(tokens, choice.Tokens...)
		}
	}
	return nil, false, fmt.Errorf("a stream ended without an error event after %d tokens: %w", len(tokens), cmp.Or(lines.Err(), io.ErrUnexpectedEOF))
}

// counts waits until the router has counted what its clients have seen, and says it in a line.
func (x *routed) counts(asked int) string {
	x.Helper()
	var m cluster.Metrics
	outcome := func(names ...string) (n float64) {
		for _, name := range names {
			n += m.Sum("kvport_router_requests_total", fmt.Sprintf("outcome=%q", name))
		}
		return n
	}
	all := float64(asked) + float64(x.cut.Load())
	require.Eventually(x, func() bool {
		var err error
		m, err = x.Client.Metrics(x.Context(), x.router.URL)
		return err == nil && m.Sum("kvport_router_requests_total") >= all
	}, time.Minute, 20*time.Millisecond, "%v requests are counted", all)
	require.Equal(x, float64(x.cut.Load()), outcome("broken"), "streams that clients saw cut are counted as that")
	require.Equal(x, float64(asked), outcome("disaggregated", "local", "recomputed", "plain"), "every question has one whole answer")
	require.Equal(x, all, outcome("disaggregated", "local", "recomputed", "plain", "broken"), "nothing else happened")
	tokens := func(kind string) float64 {
		return m.Sum("kvport_router_prefix_tokens_total", fmt.Sprintf("kind=%q", kind))
	}
	require.Positive(x, tokens("cached"), "a turn finds nothing of the turns before it")
	require.Positive(x, m.Sum("kvport_router_handoffs_total", `result="loaded"`), "nothing is handed over")
	return fmt.Sprintf("%3d requests, %5d tokens compared, 0 differ; hits %5.0f of %5.0f prompt tokens; handed over %3.0f, %3.0f of them whole; turns handed %3.0f; %2.0f cut streams, %2.0f retries",
		asked, x.compared.Load(), tokens("cached"), tokens("prompt"), m.Sum("kvport_router_handoffs_total"), m.Sum("kvport_router_handoffs_total", `result="loaded"`),
		m.Sum("kvport_router_turns_total", `what="handed"`), outcome("broken"), m.Sum("kvport_router_retries_total"))
}

// policies are the names that kvport route knows.
func policies(t *testing.T) []string {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), rig.Binary(t), "route", "--decode", "http://127.0.0.1:1", "--policy", "?").CombinedOutput()
	require.Error(t, err, "a router without a policy")
	_, list, found := strings.Cut(string(text), "want ")
	require.True(t, found, "%s", text)
	list, _, _ = strings.Cut(list, "\n")
	return strings.Split(strings.TrimSpace(list), ", ")
}

// TestPoliciesUnderFaults: conversations of the real model with several turns and forks, through two prefill and two
// decode engines and a router with each policy, while engines are killed, stopped and hung, one at a time. No token
// differs, every request is answered, and a stream that is cut after it has begun ends with an error event and is
// counted.
func TestPoliciesUnderFaults(t *testing.T) {
	conversations, turns := rig.Count(t, "conversations", *flagConversations, 2, 12), rig.Count(t, "turns", *flagTurns, 3, 6)
	answer, faults := rig.Count(t, "answer", *flagAnswer, 12, 24), rig.Count(t, "faults", *flagFaults, 1, 6)
	connectors := fixture.List{testkit.Typical(t, fixture.Peers)}
	if os.Getenv("KVPORT_SOAK") != "" {
		connectors = rig.Movers(t)
	}
	plan := converse(rig.New(t), conversations, turns, answer)
	var kinds []fault
	for _, role := range []string{"decode", "prefill"} {
		for _, kind := range []string{"killed", "stopped", "hung"} {
			kinds = append(kinds, fault{kind, role})
		}
	}
	for _, f := range connectors {
		t.Run(f.Connector, func(t *testing.T) {
			x, cuts := newRouted(rig.New(t), f), int64(0)
			for i, policy := range append(policies(t), "replica") {
				rng, began, asked := rand.New(rand.NewPCG(*rig.Seed, uint64(i))), time.Now(), 0
				x.route(policy)
				var done []string
				for turn, questions := range plan {
					var amid *fault
					if n := (turn + turns - 1) % turns; n < faults { // the first turn comes last: it has nothing to find
						amid = &kinds[(i+n+int(*rig.Seed%6))%len(kinds)]
						done = append(done, amid.role+" "+amid.kind)
					}
					x.turn(questions, policy, amid, rng)
					asked += len(questions)
				}
				t.Logf("%-12s %s; %3.0f s; faults: %s", policy, x.counts(asked), time.Since(began).Seconds(), strings.Join(done, ", "))
				cuts += x.cut.Load()
				x.Stop(x.router)
			}
			for _, in := range slices.Concat(x.p[:], x.d[:]) {
				x.Idle(in.Process)
			}
			require.Positive(t, cuts, "no stream was cut: raise -faults or -answer")
		})
	}
}
