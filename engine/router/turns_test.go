package router

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

func always(string) bool { return true }

func chat(messages ...string) fields {
	var list []json.RawMessage
	for i, m := range messages {
		role := [...]string{"user", "assistant"}[i%2]
		list = append(list, json.RawMessage(fmt.Sprintf(`{"role":%q,"content":%q}`, role, m)))
	}
	data, _ := json.Marshal(list)
	return fields{"messages": data}
}

// TestTurns: the turns that follow an answer find it, and parameters that serve once are found once.
func TestTurns(t *testing.T) {
	long := strings.Repeat("words ", 30)
	for name, turns := range map[string][2]fields{
		"chat":         {chat("Hello, " + long), chat("Hello, "+long, "Hi.", "And now?")},
		"other spaces": {fields{"messages": json.RawMessage(`[{"role": "user", "content": "` + long + `"}]`)}, chat(long, "Hi.", "And?")},
		"text":         {fields{"prompt": json.RawMessage(`"` + long + `"`)}, fields{"prompt": json.RawMessage(`"` + long + ` and more"`)}},
		"one of one":   {fields{"prompt": json.RawMessage(`["` + long + `"]`)}, fields{"prompt": json.RawMessage(`"` + long + ` and more"`)}},
		"tokens":       {fields{"prompt": json.RawMessage("[" + strings.Repeat("17,", 40) + "1]")}, fields{"prompt": json.RawMessage("[" + strings.Repeat("17, ", 40) + "1, 2, 3]")}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTurns(2)
			marks := func(f fields) []uint64 { return r.marks(f.prompt()) }
			require.Nil(t, r.find(marks(turns[1]), always))
			r.keep(marks(turns[0]), 0, "http://d3", json.RawMessage("1"))
			require.Nil(t, r.find(marks(chat("Hello, "+strings.ToUpper(long))), always), "another conversation")
			other := turns[1]
			other["model"] = json.RawMessage(`"other"`)
			require.Nil(t, r.find(marks(other), always), "another model")
			delete(other, "model")
			up := func(instance string) bool { return instance != "http://d3" }
			require.Nil(t, r.find(marks(turns[1]), up), "its instance is down")
			require.JSONEq(t, "1", string(r.find(marks(turns[1]), always)))
			require.Nil(t, r.find(marks(turns[1]), always), "it is good for one use")
			ticket := json.RawMessage(`{"kvport_ticket":"x"}`)
			r.keep(marks(turns[0]), 0, "http://d3", ticket)
			for range 3 {
				require.Equal(t, ticket, r.find(marks(turns[1]), always))
			}
			r.keep(marks(turns[1]), 0, "http://d4", json.RawMessage(`{"kvport_ticket":"`+strings.Repeat("x", maxTurnParams)+`"}`))
			require.Equal(t, ticket, r.find(marks(turns[1]), always), "what is too long is not kept")
			r.keep(marks(turns[1]), 0, "http://d3", json.RawMessage(`{"kvport_ticket":"y"}`))
			r.keep(marks(turns[0]), 0, "http://d4", ticket)
			require.Equal(t, ticket, r.find(marks(turns[1]), up), "an earlier turn, if the last one cannot be had")
		})
	}
}

// TestTurnsAreBounded: the one goes that was not used for longest, and what is used up leaves no hole in the list.
func TestTurnsAreBounded(t *testing.T) {
	r := newTurns(8)
	rng := rand.New(rand.NewPCG(1, 2))
	var order []uint64
	for range 2000 {
		mark := rng.Uint64N(24)
		i := slices.Index(order, mark)
		if rng.IntN(3) == 0 {
			got := r.find([]uint64{mark}, always)
			require.Equal(t, i >= 0, got != nil)
			if i >= 0 {
				order = slices.Delete(order, i, i+1)
			}
			if got != nil && mark%2 == 0 { // of a ticket that may be used again
				order = append(order, mark)
			}
		} else {
			params := json.RawMessage("{}")
			if mark%2 == 0 {
				params = json.RawMessage(`{"kvport_ticket":"x"}`)
			}
			r.keep([]uint64{mark}, 0, "http://d0", params)
			if i >= 0 {
				order = slices.Delete(order, i, i+1)
			}
			if len(order) == 8 {
				order = order[1:]
			}
			order = append(order, mark)
		}
		require.Equal(t, len(order), r.marked.Len())
		used := uint64(0)
		for _, mark := range order {
			slot, known := r.marked.Find(mark)
			require.True(t, known)
			require.Greater(t, r.held[slot].used, used)
			used = r.held[slot].used
		}
	}
	r.keep(nil, 0, "http://d0", json.RawMessage("{}"))
	require.Equal(t, len(order), r.marked.Len(), "a short prompt is no conversation")
}

// TestTurnsOfOneClient: one client that has more conversations than are remembered does not push out those of another, also
// after a restart.
func TestTurnsOfOneClient(t *testing.T) {
	ticket := func(i int) json.RawMessage { return fmt.Appendf(nil, `{"kvport_ticket":"%d"}`, i) }
	r := newTurns(8)
	r.seed = 1
	few, many := r.client("few"), r.client("many")
	require.NotEqual(t, few, many)
	r.keep([]uint64{1}, few, "http://d0", ticket(1))
	for i := range 100 {
		r.keep([]uint64{100 + uint64(i)}, many, "http://d0", ticket(i))
	}
	require.Equal(t, ticket(1), r.find([]uint64{1}, always))
	require.Equal(t, ticket(93), r.find([]uint64{193}, always), "seven of the other one's")
	require.Nil(t, r.find([]uint64{192}, always))

	next := newTurns(8)
	data, err := r.snapshot().encode(maxTurnsFile)
	require.NoError(t, err)
	var f turnsFile
	require.NoError(t, json.Unmarshal(data, &f))
	next.restore(&f)
	require.Equal(t, few, next.client("few"))
	for i := range 100 {
		next.keep([]uint64{200 + uint64(i)}, many, "http://d0", ticket(i))
	}
	require.Equal(t, ticket(1), next.find([]uint64{1}, always))
}

// TestClientsOfRequests: the history and the turns of two API keys are told apart.
func TestClientsOfRequests(t *testing.T) {
	p, d := serveInstance(t, ticket("of P")), serveInstance(t, held("of D", false))
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), Turns: 2, OwnKeys: true, Key: anyKey})
	f.router.turns.seed = 1
	require.NotEqual(t, f.router.turns.client(KeyID("a")), f.router.turns.client(KeyID("b")))
	send := func(key string, body fields) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/chat/completions", strings.NewReader(string(body.encode())))
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	long := strings.Repeat("long ", 20)
	send("a", chat(long))
	for i := range 5 {
		send("b", chat(fmt.Sprint(i, long)))
	}
	send("a", chat(long, "answer", "next"))
	asked := p.requests()
	require.Contains(t, string(asked[len(asked)-1].body["kv_transfer_params"]), `"kvport_ticket":"of D"`)
}

func TestFilter(t *testing.T) {
	body := "data: {\"a\":1}\n\ndata: {\"kv_transfer_params\":null}\n\n" +
		"data: {\"text\":\"\\\"kv_transfer_params\\\"\"}\n\n" +
		"data:{\"choices\":[],\"kv_transfer_params\" : {\"kvport_ticket\":\"x\"}}\n\ndata: [DONE]\n\n"
	long := "data: " + strings.Repeat("x", 3*maxEvent) + "\n"
	for size := 1; size < len(body); size++ {
		var got, out []byte
		s := filter{change: func(event []byte) []byte {
			got = append(got, event...)
			return []byte(" {}\n")
		}}
		pass := func(text string, size int) {
			for at := 0; at < len(text); at += size {
				out = append(out, s.write([]byte(text[at:min(len(text), at+size)]))...)
				require.LessOrEqual(t, len(s.line), maxEvent)
			}
		}
		pass(long, 32<<10+size)
		pass(body, size)
		require.Equal(t, " {\"kv_transfer_params\":null}\n"+`{"choices":[],"kv_transfer_params" : {"kvport_ticket":"x"}}`+"\n", string(got))
		require.Empty(t, s.line)
		require.Equal(t, long+"data: {\"a\":1}\n\ndata: {}\n\ndata: {\"text\":\"\\\"kv_transfer_params\\\"\"}\n\ndata: {}\n\ndata: [DONE]\n\n", string(out))
	}
	s := filter{}
	require.Equal(t, "data: {}\n", string(s.write([]byte("data: {}\ndata: {\"kv_transfer_par"))), "what may be a ticket waits for its end")
	s.off = true
	require.Equal(t, "data: {", string(s.write([]byte("data: {"))))
}

// TestTicketsStayInside: a client gets everything that a decode instance answers, except the ticket, which is for prefill
// instances; also where the end of a stream is cut off.
func TestTicketsStayInside(t *testing.T) {
	const text = `{"text":"\"kv_transfer_params\":{\"a\":1}", "kv_transfer_params":%s,"n":1.50}`
	held, bare := fmt.Sprintf(text, `{"a":1}`), fmt.Sprintf(text, "null")
	spaced := func(s string) string {
		return strings.Replace(s, `"kv_transfer_params":`, "\"kv_transfer_params\"\t:  ", 1)
	}
	lines := func(s string) string { return strings.ReplaceAll(s, ",", ",\n") }
	stream := func(s string) string { return "data: {\"n\":1}\n\ndata:" + s + "\n\ndata: [DONE]\n\n" }
	long := fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("long ", 20))
	for answer, want := range map[string]string{
		held: bare, spaced(held): spaced(bare), lines(spaced(held)): lines(spaced(bare)), bare: bare, "no JSON": "no JSON",
		stream(held): stream(bare), stream(" " + spaced(held)): stream(" " + spaced(bare)),
		": " + held + "\n\ndata: 1\n\ndata: [DONE]\n\n": ": " + held + "\n\ndata: 1\n\ndata: [DONE]\n\n",
		"data: {\"error\": 1, " + held[1:]:              "data: {\"error\": 1, " + bare[1:], // the last event has no end
	} {
		d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
			if strings.Contains(answer, "data:") {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			fmt.Fprint(w, answer)
		})
		for _, turns := range []int{0, 10} {
			f := serveRouter(t, Config{Prefill: urls(serveInstance(t, ticket("of P"))), Decode: urls(d), Turns: turns})
			_, got := post(t, f.URL+"/v1/completions", long)
			if turns == 0 {
				require.Equal(t, answer, got)
			} else {
				require.Equal(t, want, got)
				tickets := strings.Count(answer, `{"a":1}`) - strings.Count(want, `{"a":1}`)
				require.Equal(t, float64(tickets), testutil.ToFloat64(f.router.metrics.turns.WithLabelValues("kept")))
			}
		}
	}
}

// TestNestedPrompts: a prompt is known in a list of one, and neither lists within lists nor a multitude of messages cost
// more than reading the body.
func TestNestedPrompts(t *testing.T) {
	words := `"` + strings.Repeat("words ", 20) + `"`
	ids := "[" + strings.Repeat("17, ", 40) + "1]"
	known := func(prompt string) int {
		_, text := fields{"prompt": json.RawMessage(prompt)}.prompt()
		return len(text)
	}
	require.Equal(t, 120, known(words))
	require.Equal(t, 120, known("[ "+words+" ]"))
	require.Equal(t, 40*3+2, known(ids))
	require.Equal(t, 40*3+2, known("["+ids+"]"))
	for _, none := range []string{"[[" + words + "]]", "[[" + ids + "]]", `["a","b"]`, "[]", "{}", "[-1]", "[1.5]"} {
		require.Zero(t, known(none), none)
	}
	deep := func(inner string) json.RawMessage {
		return json.RawMessage(strings.Repeat("[", 2000) + inner + strings.Repeat("]", 2000))
	}
	messages := json.RawMessage("[" + strings.Repeat("{},", 50*maxMessages) + "{}]")
	numbers := json.RawMessage("[" + strings.Repeat("1,", 50*maxMessages) + "1]")
	for name, f := range map[string]fields{
		"text": {"prompt": deep(`"x"`)}, "numbers": {"prompt": deep("1")}, "two": {"prompt": deep(`"x"],["y"`)}, "flat": {"prompt": numbers},
		"messages": {"messages": messages}, "no messages": {"messages": numbers}, "deep messages": {"messages": deep("{}")},
	} {
		allocations := testing.AllocsPerRun(1, func() {
			f.prompt()
			f.beginning()
			f.question()
			f.several()
			f.estimate()
		})
		require.Less(t, allocations, 20.0*maxMessages, name)
		if f["prompt"] != nil {
			require.Less(t, allocations, 500.0, name)
		}
	}
}

// held answers as a decode instance that holds its answer, streaming if asked to.
func held(name string, stream bool) http.HandlerFunc {
	params := fmt.Sprintf(`{"id":"d","kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":true,"kvport_ticket":%q}}`, name)
	return func(w http.ResponseWriter, _ *http.Request) {
		if !stream {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, params)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"n\":1}\n\ndata: %s\n\ndata: [DONE]\n\n", params)
	}
}

// ask sends a chat request and reads all of its answer.
func (f *front) ask(t *testing.T, body fields) {
	t.Helper()
	resp, err := f.Client().Post(f.URL+"/v1/chat/completions", "application/json", strings.NewReader(string(body.encode())))
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
}

// TestNextTurn: the prefill instances of the turns that follow are told where the last answer is held; and the
// decode instances are asked to hold theirs.
func TestNextTurn(t *testing.T) {
	for _, stream := range []bool{false, true} {
		p := serveInstance(t, ticket("of P"))
		d := serveInstance(t, held("of D", stream))
		f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, Turns: 10})
		long := strings.Repeat("long ", 20)
		for _, body := range []fields{chat(long), chat(long, "answer", "next"), chat(long, "answer", "next")} {
			f.ask(t, body)
		}
		params := func(s seen) (p struct {
			Prefill bool    `json:"do_remote_prefill"`
			Decode  bool    `json:"do_remote_decode"`
			Ticket  string  `json:"kvport_ticket"`
			Blocks  [][]int `json:"remote_block_ids"`
		},
		) {
			require.NoError(t, json.Unmarshal(s.body["kv_transfer_params"], &p))
			return p
		}
		ps, ds := p.requests(), d.requests()
		require.Len(t, ps, 3)
		require.Len(t, ds, 3)
		require.Empty(t, params(ps[0]).Ticket)
		require.Equal(t, "of D", params(ps[1]).Ticket)
		require.True(t, params(ps[1]).Decode)
		require.False(t, params(ps[1]).Prefill)
		require.Equal(t, "of D", params(ps[2]).Ticket, "the second turn's own answer")
		for _, s := range ds {
			got := params(s)
			require.True(t, got.Decode && got.Prefill)
			require.Equal(t, "of P", got.Ticket)
			require.Equal(t, [][]int{{1, 2}}, got.Blocks, "all else is passed on")
		}
	}
}

// TestForks: each of several follow-ups to one answer is told where that is held.
func TestForks(t *testing.T) {
	p, d := serveInstance(t, ticket("of P")), serveInstance(t, held("of D", false))
	f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, Turns: 10})
	long := strings.Repeat("long ", 20)
	f.ask(t, chat(long))
	for _, next := range []string{strings.Repeat("this ", 20), strings.Repeat("that ", 20), strings.Repeat("else ", 20)} {
		f.ask(t, chat(long, "answer", next))
	}
	ps := p.requests()
	require.Len(t, ps, 4)
	for _, s := range ps[1:] {
		require.Contains(t, string(s.body["kv_transfer_params"]), `"kvport_ticket":"of D"`)
	}
}

// TestTurnsByDefault: without the flag, answers are held where a prefill and the decode instance say that they are
// kv_both and hand blocks over by ticket.
func TestTurnsByDefault(t *testing.T) {
	for _, c := range []struct {
		p, d string
		way  string
		held bool
	}{
		{"kv_both", "kv_both", "HolderConnector", true},
		{"kv_both", "kv_both", "MultiConnector/HolderConnector", true},
		{"kv_both", "kv_both", "a shared store", false},
		{"kv_both", "kv_both", "the node's StoreConnector", false},
		{"kv_producer", "kv_both", "HolderConnector", false},
		{"kv_both", "kv_consumer", "HolderConnector", false},
		{"", "", "", false},
	} {
		p, d := serveInstance(t, ticket("of P")), serveInstance(t, held("of D", false))
		f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, Turns: 10, TurnsWhereKnown: true})
		for i, role := range []string{c.p, c.d} {
			if role != "" {
				f.router.pool.mu.Lock()
				f.router.pool.known[i].fit = &fit{Role: role, Gives: []string{c.way}, Takes: []string{c.way}}
				f.router.pool.mu.Unlock()
			}
		}
		f.ask(t, chat(strings.Repeat("long ", 20)))
		ds := d.requests()
		require.Len(t, ds, 1)
		require.Equal(t, c.held, strings.Contains(string(ds[0].body["kv_transfer_params"]), `"do_remote_decode":true`), "%+v", c)
	}
}

// TestNoTurns: without conversations to remember nothing is asked for and nothing told.
func TestNoTurns(t *testing.T) {
	p := serveInstance(t, ticket("of P"))
	d := serveInstance(t, held("of D", false))
	f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}})
	long := strings.Repeat("long ", 20)
	for _, body := range []fields{chat(long), chat(long, "answer", "next")} {
		f.ask(t, body)
	}
	for _, s := range p.requests() {
		require.NotContains(t, string(s.body["kv_transfer_params"]), "ticket")
	}
	for _, s := range d.requests() {
		require.NotContains(t, string(s.body["kv_transfer_params"]), "do_remote_decode")
	}
}

// TestTurnsStayInTheirGroup: a prefill instance is told about answers in its own group alone.
func TestTurnsStayInTheirGroup(t *testing.T) {
	ps := []*instanceServer{serveInstance(t, ticket("of P")), serveInstance(t, ticket("of P"))}
	ds := []*instanceServer{serveInstance(t, held("of a", false)), serveInstance(t, held("of b", false))}
	f := serveRouter(t, Config{Turns: 10, Replicas: []Replica{{"a", urls(ps[0]), urls(ds[0])}, {"b", urls(ps[1]), urls(ds[1])}}})
	first, other := strings.Repeat("first ", 20), strings.Repeat("other ", 20)
	for i, prompt := range []string{first, other, first, other, other, first} { // groups take turns
		if i < 2 {
			f.ask(t, chat(prompt))
		} else {
			f.ask(t, chat(prompt, "answer", "next"))
		}
	}
	for i, group := range []string{"a", "b"} {
		got := ps[i].requests()
		require.Len(t, got, 3)
		for n, told := range []bool{false, true, false} {
			params := string(got[n].body["kv_transfer_params"])
			require.Equal(t, told, strings.Contains(params, `"kvport_ticket":"of `+group+`"`), params)
			require.Equal(t, told, strings.Contains(params, "kvport_ticket"), params)
		}
	}
}

// TestGoesBack: answers go back only to prefill instances that may be the decode instance's partner and load.
func TestGoesBack(t *testing.T) {
	p := newTestPool(t)
	instances := func(group string) []spec {
		return []spec{{role: prefill, group: "a", url: at(t, "http://p")}, {role: decode, group: group, url: at(t, "http://d")}}
	}
	goesBack := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.goesBack(1, 0)
	}
	both := func(change ...func(*fit)) *fit {
		return engineFit("kv_both", append([]func(*fit){gives("HolderConnector"), takes("HolderConnector", "HolderConnector")}, change...)...)
	}
	require.NoError(t, p.set(byFile, instances("a")))
	require.True(t, goesBack(), "nothing else is known")
	require.False(t, p.bothWays(1), "nothing is known")
	p.saw(0, both(func(f *fit) { f.EngineID = "p" }))
	p.saw(1, both())
	require.True(t, goesBack())
	require.True(t, p.bothWays(1))
	for what, change := range map[string]func(){
		"another group": func() { require.NoError(t, p.set(byFile, instances("b"))) },
		"another model": func() { p.saw(1, both(func(f *fit) { f.Model = "other" })) },
		"saves alone":   func() { p.saw(0, both(func(f *fit) { f.EngineID, f.Role = "p", "kv_producer" })) },
		"gone":          func() { p.probed(1, refused) },
	} {
		change()
		require.False(t, goesBack(), what)
		require.False(t, p.bothWays(1), what)
		require.NoError(t, p.set(byFile, instances("a")))
		p.saw(0, both(func(f *fit) { f.EngineID = "p" }))
		p.saw(1, both())
		p.probed(1, healthy)
		require.True(t, goesBack(), what)
	}
}

// TestRetryOfTurn: when a prefill instance fails, the next one is told about the last answer as well, unless that serves once:
// the first may have used it.
func TestRetryOfTurn(t *testing.T) {
	once := func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"kv_transfer_params":{"do_remote_decode":true,"remote_engine_id":"d","kvport_ticket_":"of D"}}`)
	}
	for want, d := range map[int]http.HandlerFunc{1: once, 2: held("of D", false)} {
		var failing atomic.Bool
		ps, pURLs := several(t, 2, func(w http.ResponseWriter, r *http.Request) {
			if failing.CompareAndSwap(true, false) {
				code(500)(w, r)
				return
			}
			ticket("of P")(w, r)
		})
		f := serveRouter(t, Config{Prefill: pURLs, Decode: urls(serveInstance(t, d)), Turns: 10})
		long := strings.Repeat("long ", 20)
		f.ask(t, chat(long))
		failing.Store(true)
		f.ask(t, chat(long, "answer", "next"))
		asked, told := 0, 0
		for _, p := range ps {
			for _, s := range p.requests() {
				asked++
				told += strings.Count(string(s.body["kv_transfer_params"]), `"of D"`)
			}
		}
		require.Equal(t, 3, asked)
		require.Equal(t, want, told)
		require.Equal(t, float64(want), testutil.ToFloat64(f.router.metrics.turns.WithLabelValues("handed")))
	}
}

// TestLongTicketIsNotKept: and not counted.
func TestLongTicketIsNotKept(t *testing.T) {
	for length, want := range map[int]float64{10: 1, maxTurnParams: 0} {
		d := serveInstance(t, held(strings.Repeat("x", length), false))
		f := serveRouter(t, Config{Prefill: urls(serveInstance(t, ticket("of P"))), Decode: urls(d), Turns: 10})
		f.ask(t, chat(strings.Repeat("long ", 20)))
		require.Equal(t, want, testutil.ToFloat64(f.router.metrics.turns.WithLabelValues("kept")))
	}
}
