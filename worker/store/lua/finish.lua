-- Write everything that RQ writes when a job ends, if this execution still holds the job.
-- status: 'finished', 'failed' or 'stopped'. ttl: seconds for which the job is kept; '' leaves its time to live alone.
-- score: its score in the registry, '' for no entry. next_run: when it runs again, as put_back takes it, '' for never.
-- repeats_left: the repeats that remain then, '' for none.
-- Returns
--   'done';
--   'dependents' if jobs wait for this one, which stays held until close.lua;
--   'again' if this very call was carried out before;
--   'lost' if the job was given up, cancelled, deleted or enqueued again.
local status, ttl, score, next_run, repeats_left = args.status, args.ttl, args.score, args.next_run, args.repeats_left

local reply = not_held()
if reply then return reply end

write_run('status', status)
if score ~= '' then
  call('ZADD', (status == 'finished' and 'rq:finished:' or 'rq:failed:') .. queue, score, id)
end
count(status == 'finished' and 'successful_job_count' or 'failed_job_count')
add_result()
leave_slot(next_run)
if call('EXISTS', job .. ':dependents') == 1 then
  call(
    'HSET', job, 'ended_by', eid, 'ended_as', status, 'ended_ttl', ttl, 'next_run', next_run,
    'next_repeats_left', repeats_left
  )
  return 'dependents'
end
settle(ttl, next_run, repeats_left)
return 'done'
