-- Take jobs of one queue and open their executions, until they bring `most` sequences: one for each job, or what the
-- job's field `sequences` says. Nothing is claimed while `rq suspend` holds all workers, or after Redis came back with
-- older data, until a person confirms that.
--
-- As with RQ's own workers, a job only has to stand in the queue. Jobs that are deleted or cancelled are dropped from
-- it. So are jobs that this claim or an open execution has taken, unless somebody has enqueued them again since.
--
-- These jobs stay where they are in the queue, for other workers:
--   jobs whose field `tokenmill_model` has a line that is not among `models`: the model, or an adapter;
--   jobs whose `tokenmill_format` is above `format`, and shards with any other format, as only the version that wrote
--   their plan can read it;
--   jobs whose `tokenmill_kind` is 'function' beyond `max_functions`, or 'file' beyond `max_files`.
--
-- A suspect is a job with which `suspect_deaths` workers have died. It is claimed alone, and only if `takes_suspects`,
-- so that jobs that were merely held beside it are told from it. Otherwise it goes to the end of the queue.
--
-- A claim also ends once the hashes that it has read have `max_hash_bytes`, or once this worker has its share. The
-- share is that of `num_takers` workers in all jobs that wait or are held; this worker holds `num_held` of them. It is
-- rounded up. For jobs with several sequences it is rounded up only if `rounds_up`, as one shard more may be an hour's
-- work.
--
-- Returns {
--   {{job id, execution id, job_hash, deaths, id of the last job left before it for lack of a place, journal, pieces},
--    ...},
--   number of jobs left for other models or versions,
--   id of the first job left to other workers as their share, or '',
--   why nothing is claimed: '', 'suspended' or 'restored',
--   number of jobs left for newer versions,
--   an epoch to send with the next claim, or ''
-- }.
-- Sent again with the same token, it returns the same jobs, without those that were taken from this worker since, and
-- claims no others. With `most` 0, no earlier call with this token that is still on its way claims anything either.
-- `done_tokens` are the tokens of claims that nobody will send again.
local queue, limit, token = args.queue, args.most, args.token
local num_takers, num_held = args.num_takers, args.num_held
local record = 'tokenmill:claim:' .. token
local claimed = {}

for _, done in ipairs(args.done_tokens) do call('DEL', 'tokenmill:claim:' .. done) end
local earlier = call('LRANGE', record, 0, -1)
if #earlier > 0 then
  for i = 1, #earlier, 2 do -- an id, then the last job that was left before it
    local id, job_left_before = earlier[i], earlier[i + 1]
    local eid = token .. string.format('%08x', (i + 1) / 2)
    if is_open(queue, id, eid) then
      local deaths, journal = deaths_and_journal(id)
      claimed[#claimed + 1] = {id, eid, job_hash(id), deaths, job_left_before, journal, pieces_of(id)}
    end
  end
  return {claimed, 0, '', '', 0, args.epoch}
end
if limit == 0 then
  call('RPUSH', record, '')
  call('EXPIRE', record, 600)
  return {claimed, 0, '', '', 0, args.epoch}
end

-- The claims of each second leave an epoch, '<number>:<token>'; the latest is first in the list. A worker remembers an
-- epoch that is some seconds old, so that Redis has it on its disk. If that epoch is gone while older ones are there,
-- Redis came back with older data: a snapshot, or a replica that was far behind. Jobs that have ended since then stand
-- in their queues again. Numbers begin with the time. So if Redis came back empty, no older epoch is there, and nothing
-- would run twice.
local epochs, restored = 'tokenmill:epochs', 'tokenmill:restored'
local function number_of(epoch) return tonumber(string.match(epoch or '', '^%d+')) or 0 end
local oldest = call('LINDEX', epochs, -1)
local is_kept = oldest and number_of(oldest) <= number_of(args.epoch)
if args.epoch ~= '' and is_kept and not call('LPOS', epochs, args.epoch) then
  call('SET', restored, args.now_iso, 'NX')
end
if call('EXISTS', restored) == 1 then return {claimed, 0, '', 'restored', 0, ''} end
if call('SET', 'tokenmill:epoch-made', '', 'NX', 'PX', 1000) then
  local number = math.max(number_of(call('LINDEX', epochs, 0)) + 1, math.floor(tonumber(args.now_ts)))
  call('LPUSH', epochs, string.format('%d:%s', number, token))
  call('LTRIM', epochs, 0, 599)
end
local epoch = call('LINDEX', epochs, 3) or ''
if call('EXISTS', 'rq:suspended') == 1 then return {claimed, 0, '', 'suspended', 0, epoch} end

local places = {['function'] = args.max_functions, file = args.max_files}
local is_served = {}
for _, name in ipairs(args.models) do is_served[name] = true end
local function serves_all(needed)
  for name in string.gmatch(needed, '[^\n]+') do
    if not is_served[name] then return false end
  end
  return true
end
local waiting = 'rq:queue:' .. queue
local sequences = 0 -- that the claimed jobs bring
local left = {} -- ids of jobs that stay where they are
local postponed = {} -- ids of suspects that go to the end of the queue
local num_foreign = 0
local num_newer = 0
local last_left = '' -- the last job that was left for lack of a place
local files_left = 0
local is_full = false -- the claim ends
local page = call('LRANGE', waiting, 0, 99)

-- How many jobs this worker may take beside those that it holds, and how many of those with several sequences.
-- Computed only if jobs wait.
local share, large_share = 1000000, 1000000
local first_left = '' -- the first job that was left to other workers as their share
if num_takers > 1 and page[1] then
  local all = call('LLEN', waiting) + call('HLEN', 'tokenmill:held:' .. queue)
  share = math.ceil(all / num_takers) - num_held
  large_share = args.rounds_up and share or math.max(math.floor(all / num_takers), 1) - num_held
end

-- Whether an execution that is not over has taken the job since it was last enqueued.
local function is_taken(id, enqueued_at)
  for _, eid in ipairs(call('ZREVRANGE', 'rq:executions:' .. id, 0, 99)) do
    local _, taken_at = at_claim(queue, id, eid)
    if taken_at == enqueued_at then return true end
  end
  return false
end

-- Decide about the next id of the queue: claim it, put it into `left` or `postponed`, or drop it.
local function consider(id)
  local status, enqueued_at, sequences_text, models, kind, format_text, is_followed = unpack(call(
    'HMGET', 'rq:job:' .. id, 'status', 'enqueued_at', 'sequences', 'tokenmill_model', 'tokenmill_kind',
    'tokenmill_format', 'tokenmill_stream'
  ))
  -- A hash without the fields that every enqueueing writes may be what a late write left of a deleted job.
  if not (status and enqueued_at) and call('HSTRLEN', 'rq:job:' .. id, 'data') == 0 then return end
  local is_cancelled = status == 'canceled' and call('ZSCORE', 'rq:canceled:' .. queue, id)
  if is_cancelled or is_taken(id, enqueued_at or '') then return end
  local format = tonumber(format_text or '') or args.format
  local is_newer = format > args.format
  local is_unread = is_newer or (format < args.format and kind == 'file')
  num_newer = num_newer + (is_newer and 1 or 0)
  local is_foreign = is_unread or (models and not serves_all(models))
  local free = places[kind or '']
  if is_foreign or (free and free <= 0) then
    left[#left + 1] = id
    num_foreign = num_foreign + (is_foreign and 1 or 0)
    last_left = is_foreign and last_left or id
    files_left = files_left + (kind == 'file' and 1 or 0)
    return
  end
  local deaths, journal = deaths_and_journal(id)
  local pieces = is_followed and pieces_of(id) or {} -- most jobs are not followed, which saves a command
  local is_suspect = deaths >= args.suspect_deaths
  local num_sequences = math.max(1, tonumber(sequences_text) or 1)
  if is_suspect and (not args.takes_suspects or #claimed > 0) then
    postponed[#postponed + 1] = id
  elseif num_sequences > 1 and #claimed >= large_share then
    left[#left + 1] = id
    is_full = true
    first_left = id
  else
    local eid = token .. string.format('%08x', #claimed + 1)
    local entry = open_execution(queue, id, eid, deaths, journal, pieces)
    entry[5] = last_left
    claimed[#claimed + 1] = entry
    call('RPUSH', record, id, last_left)
    if free then places[kind] = free - 1 end
    sequences = sequences + num_sequences
    is_full = is_suspect or sequences >= limit or #claimed >= share or bytes_read >= max_hash_bytes
  end
end

-- The look is bounded, so that a queue of a million deleted or foreign jobs does not stop the server for everybody.
-- Jobs behind more than 1,000 of these, or behind 200 files, wait until those are gone.
local looked_at, bound = 0, limit + 1000
while looked_at < bound and files_left < 200 and not is_full and share > 0 do
  local place = looked_at % 100
  if place == 0 and looked_at > 0 then page = call('LRANGE', waiting, looked_at, looked_at + 99) end
  if not page[place + 1] then break end
  looked_at = looked_at + 1
  tried(consider, page[place + 1]) -- fails if the key of this id holds no job
end

-- Nothing is written if all jobs that were seen stay, because an idle worker looks many times a second.
if looked_at > #left then
  call('LPOP', waiting, looked_at)
  for i = #left, 1, -1 do call('LPUSH', waiting, left[i]) end
  for _, id in ipairs(postponed) do call('RPUSH', waiting, id) end
end
if #claimed > 0 then call('EXPIRE', record, 600) end
if looked_at == bound and #claimed == 0 then num_foreign = call('LLEN', waiting) end
if #claimed >= share then first_left = call('LINDEX', waiting, #left) or '' end -- behind `left`, which was put back
return {claimed, num_foreign, first_left, '', num_newer, epoch}
